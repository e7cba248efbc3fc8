#!/usr/bin/env bash
# The drafter of qwen2.5-coder-1.5b, from that of qwen2.5-coder-0.5b, on two CPU cores (an hour and a half) or a GPU.
#
#   bash recipes/coder_1.5b_drafter.sh
#
# Killed, the same command goes on. Prompts are those of the answers in recipes/answers/qwen2.5-coder-0.5b, from which what
# HumanEval and MBPP's test set hold was left out. What ships was trained in two turns, 599 answers and then 2,054 others
# (its card): LIMIT=2660 MINUTES=53 takes all at once. Environment: OUT (run folder), LIMIT (prompts), MINUTES (of training),
# PROCESSES.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/coder-1.5b-drafter}
donor=qwen2.5-coder-0.5b target=qwen2.5-coder-1.5b

# 1. Prompts, in an order that does not change, and the target's own answers.
mkdir -p "$out"
python recipes/prompts_of_answers.py --target "$donor" --answers "recipes/answers/$donor" --out "$out/all.jsonl"
python - "$out" <<'PY'
import random
import sys
from pathlib import Path

folder = Path(sys.argv[1])
lines = folder.joinpath("all.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
random.Random(3).shuffle(lines)
folder.joinpath("prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
PY
paceline regenerate --target "$target" --prompts "$out/prompts.jsonl" --limit "${LIMIT:-600}" --max-tokens 160 \
    --max-prompt-tokens 256 --max-batch 16 --out "$out/answers"

# 2. The donor's drafter reads the new target's hidden states through a matrix that fits them to the donor's.
[ -e "$out/moved/config.json" ] || python recipes/transplant_drafter.py --donor "$donor" --target "$target" \
    --texts "recipes/answers/$donor"/* --documents 40 --out "$out/moved"

# 3. It learns from the target's own answers, in processes of one thread each, and 8 bits.
OMP_NUM_THREADS=1 torchrun --nproc-per-node "${PROCESSES:-$(nproc)}" -m paceline train --target "$target" \
    --answers "$out/answers/answers" --init "$out/moved" --plan off --max-len 448 --max-tokens 160 --epochs 1000 \
    --max-minutes "${MINUTES:-25}" --blocks-per-step 192 --anchors 48 --lr 8e-4 --loss d-pace --selector-from 0 \
    --serve-share 0 --heldout-every 50 --keep best --shared-features "$out/features" --out "$out/run"
python recipes/pack_drafter.py "$out/run/drafter" --out "$out/shipped"
echo "drafter: $out/shipped"
