#!/usr/bin/env bash
# Fine-tune the default drafter on one application's traffic: a shop's support desk whose model answers tickets in JSON.
#
#   bash recipes/custom_workload.sh
#
# Tokens per round before and after, on tickets the drafter never saw and on general prompts. Ends with exit status 1 when the
# held-out tickets are not at least 2 times better, or the general prompts more than 10% worse. Killed, the same command goes on.
#
# Environment: OUT (run folder), TARGET, DRAFTER (what is fine-tuned: `default`, or a DFlash drafter's folder), MINUTES (of
# training), PROCESSES, TICKETS, HELDOUT, REPLAY (general prompts mixed in), GENERAL_TRAIN (their file; unset, the target writes
# them itself), GENERAL (prompts that measure the general case; never those of GENERAL_TRAIN).
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/custom-workload}
target=${TARGET:-smollm2-135m}
drafter=${DRAFTER:-default}
minutes=${MINUTES:-8}
tickets=${TICKETS:-1200}
heldout=${HELDOUT:-40}
replay=${REPLAY:-300}
general=${GENERAL:-paceline/bench/prompts.jsonl}

# Two processes of one thread each: no operation waits for the other core.
processes=${PROCESSES:-$(nproc)}
many=(paceline)
if [ "$processes" -gt 1 ]; then
    many=(env OMP_NUM_THREADS=1 torchrun --nproc-per-node "$processes" -m paceline)
fi

mkdir -p "$out"

# stage NAME COMMAND...: the command's seconds go to $out/seconds.txt; a stage that is resumed has a line each time.
stage() {
    local name=$1 begin
    shift
    echo "== $name" >&2
    begin=$(date +%s)
    "$@"
    echo "$name $(($(date +%s) - begin))" >> "$out/seconds.txt"
}

# 1. Tickets. Held-out ones have customers, cities and products of their own.
python recipes/support_tickets.py --train "$tickets" --heldout "$heldout" --out "$out/tickets"

# 2. Where we start: the general drafter, on both sets, greedy, one request at a time.
measure=(--target "$target" --prompts "$out/tickets/heldout.jsonl" --prompts "$general"
    --batch 1 --temperature 0 --max-tokens 128)
stage evaluate-before paceline evaluate "$drafter" "${measure[@]}" --out "$out/before"

# 3. The target answers the training tickets: what it says is all that a drafter has to learn.
stage answer-tickets "${many[@]}" regenerate --target "$target" --prompts "$out/tickets/train.jsonl" \
    --out "$out/ticket-answers" --max-tokens 128

# 4. And some general prompts, so that the drafter does not forget the rest of the language.
if [ -n "${GENERAL_TRAIN:-}" ]; then
    prompts=(--prompts "$GENERAL_TRAIN" --limit "$replay")
else
    prompts=(--self-written "$replay")
fi
stage answer-general "${many[@]}" regenerate --target "$target" "${prompts[@]}" --out "$out/general-answers" --max-tokens 128

# 5. Fine-tune on both.
stage train "${many[@]}" train --target "$target" --init "$drafter" \
    --answers "$out/ticket-answers/answers" --answers "$out/general-answers/answers" \
    --out "$out/drafter-run" --max-len 512 --max-tokens 128 --max-minutes "$minutes" --epochs 20 \
    --blocks-per-step 192 --anchors 48 --lr 1e-3 --loss-vocab 8192 --features cached --heldout-every 250

# 6. The same measurement with the fine-tuned drafter.
stage evaluate-after paceline evaluate "$out/drafter-run/drafter" "${measure[@]}" --out "$out/after"

# 7. What it brought.
python - "$out" "$general" <<'PYTHON'
import json
import sys
from pathlib import Path

out, general = Path(sys.argv[1]), Path(sys.argv[2]).stem
before, after = (json.loads((out / when / "evaluation.json").read_text())["heldout"] for when in ("before", "after"))
ratio = {name: after[name] / before[name] for name in ("heldout", general)}
print(f"\ntokens per round         {'before':>8}{'after':>8}{'ratio':>8}")
for name, label in (("heldout", "held-out tickets"), (general, f"general ({general})")):
    print(f"{label:<24} {before[name]:>8.2f}{after[name]:>8.2f}{ratio[name]:>7.2f}x")
seconds = [line.split() for line in (out / "seconds.txt").read_text().splitlines()]
spent = sum(int(number) for _, number in seconds)
print(f"{spent / 60:.1f} minutes: " + ", ".join(f"{name} {int(number) / 60:.1f}" for name, number in seconds))
faults = []
if ratio["heldout"] < 2:
    faults.append("held-out tickets improved less than 2 times")
if ratio[general] < 0.9:
    faults.append("general prompts lost more than 10%")
sys.exit("; ".join(faults) or 0)
PYTHON
