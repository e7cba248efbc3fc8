#!/usr/bin/env bash
# What each part of DFlash 2 brings: one DFlash drafter, continued four ways from the same checkpoint, answers and number of blocks.
#
#   INIT=path/to/dflash/drafter ANSWERS="runs/a/answers runs/b/answers" bash experiments/dflash2_ablation.sh
#
# v1         as it is, longer
# conv       DFlash 2's convolutions, which begin as the identity; no selector
# selector   convolutions, and the selector learns from the last four fifths on
# anchors    the same, and half of the blocks begin where served rounds of INIT do
#
# Killed, the same command goes on. Hidden states are computed once (FEATURES names a run folder that has them already). Prints a
# line for each way: tokens a round expected of held-out answers with and without the selector's choice, and served.
# Environment: OUT (run folder), STEPS (500, of 192 blocks each), TARGET (smollm2-135m).
set -euo pipefail
cd "$(dirname "$0")/.."

init=${INIT:?name the DFlash drafter to go on from, as in INIT=runs/a/drafter}
answers=${ANSWERS:?name folders of answers, as in ANSWERS="runs/a/answers runs/b/answers"}
out=${OUT:-runs/dflash2-ablation}
steps=${STEPS:-500}
features=${FEATURES:-$out/v1}

train=(paceline train --target "${TARGET:-smollm2-135m}" --plan off --init "$init" --max-len 512 --max-tokens 128 --max-steps "$steps"
    --blocks-per-step 192 --anchors 48 --lr 1.3e-3 --loss d-pace --loss-vocab 8192 --features cached --heldout-every "$steps")
for folder in $answers; do
    train+=(--answers "$folder")
done
second=(--drafter-kind dflash2)
ways=(v1 conv selector anchors)
declare -A options=(
    [v1]=""
    [conv]="${second[*]} --selector-from 1"
    [selector]="${second[*]} --selector-from 0.2"
    [anchors]="${second[*]} --selector-from 0.2 --round-starts 0.5"
)
for way in "${ways[@]}"; do
    mkdir -p "$out/$way"
    if [ "$out/$way" != "$features" ]; then
        for folder in "$features"/features-*; do  # links, not copies
            if [ -d "$folder" ] && [ ! -e "$out/$way/$(basename "$folder")" ]; then cp -al "$folder" "$out/$way/"; fi
        done
    fi
    read -r -a more <<< "${options[$way]}"
    "${train[@]}" "${more[@]}" --out "$out/$way"
done

python - "$out" "${ways[@]}" <<'PYTHON'
import json
import sys
from pathlib import Path

from paceline.runlog import record_of

out, ways = Path(sys.argv[1]), sys.argv[2:]
figures = {}
for way in ways:
    lines = [json.loads(line) for line in (out / way / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "heldout" in line][-1]
    served = json.loads((out / way / "heldout.json").read_text())["tokens_per_round"]
    figures[way] = {"blocks": last["blocks"], **{name: value for name, value in last["heldout"].items() if "eal" in name}, "served": served}
    print(way, figures[way])
made = {"command": "bash experiments/dflash2_ablation.sh", "what": "parts of DFlash 2"}
print(json.dumps(record_of({**made, **figures})))
PYTHON
