#!/usr/bin/env bash
# The planner's own choices for smollm2-135m beside the recipe of the drafter that ships: the same answers, equally many blocks.
#
#   DATA=path/to/prompt/sets bash experiments/planner_vs_recipe.sh
#
# Killed, the same command goes on. Answers are those of recipes/default_drafter.sh (about ten minutes on two cores), then each
# learns from STEPS x 192 blocks. Prints tokens a round that held-out answers are expected to bring, and served, of both.
# Environment: OUT (run folder), STEPS (1000).
set -euo pipefail
cd "$(dirname "$0")/.."

data=${DATA:?name the folder of prompt sets, as in DATA=prompts bash experiments/planner_vs_recipe.sh}
out=${OUT:-runs/planner-vs-recipe}
steps=${STEPS:-1000}
target=smollm2-135m

python recipes/default_prompts.py --mbpp "$data/mbpp_train.jsonl" --out "$out/prompts"
answer=(paceline regenerate --target "$target" --max-tokens 160 --max-prompt-tokens 384)
"${answer[@]}" --prompts "$data/gsm8k_train.jsonl" --limit 2500 --out "$out/arithmetic"
"${answer[@]}" --prompts "$out/prompts/kinds.jsonl" --limit 700 --out "$out/kinds"
"${answer[@]}" --prompts "$data/t0_tasks.jsonl" --limit 500 --out "$out/tasks"
"${answer[@]}" --prompts "$data/mbpp_train.jsonl" --prompts "$data/user_instructions.jsonl" \
    --prompts "$data/seed_tasks.jsonl" --out "$out/instructions"
"${answer[@]}" --prompts "$out/prompts/functions.jsonl" --temperature 0,0.7 --out "$out/functions"
"${answer[@]}" --self-written 1000 --openers "$out/prompts/openers.txt" --out "$out/self-written"

train=(paceline train --target "$target" --max-len 512 --max-tokens 128 --max-steps "$steps" --blocks-per-step 192 --features cached
    --heldout-every "$steps")
for folder in arithmetic kinds tasks instructions functions self-written; do
    train+=(--answers "$out/$folder/answers")
done
"${train[@]}" --out "$out/planned"
"${train[@]}" --out "$out/recipe" --plan off --first-layers copied --anchors 48 --lr 2e-3 --loss d-pace --loss-vocab 8192

python - "$out/planned" "$out/recipe" <<'EOF'
import json
import sys
from pathlib import Path

from paceline.runlog import record_of

figures = {}
for folder in map(Path, sys.argv[1:]):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "heldout" in line][-1]
    served = json.loads((folder / "heldout.json").read_text())["tokens_per_round"]
    figures[folder.name] = {"blocks": last["blocks"], "expected": round(last["heldout"]["eal"], 3), "served": round(served, 3)}
    print(f"{folder.name}: {last['blocks']:,} blocks, {last['heldout']['eal']:.3f} tokens a round expected, {served:.3f} served")
ratio = {name: figures["planned"][name] / figures["recipe"][name] for name in ("expected", "served")}
print(f"planned over recipe: {ratio['expected']:.3f} expected, {ratio['served']:.3f} served")
made = {"command": "bash experiments/planner_vs_recipe.sh", "what": "planner beside recipe"}
print(json.dumps(record_of({**made, **figures, "ratio": ratio})))
EOF
