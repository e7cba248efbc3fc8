#!/usr/bin/env bash
# The drafter of qwen2.5-coder-0.5b, from prompts to a checkpoint, on two CPU cores or a GPU.
#
#   DATA=path/to/prompt/sets bash recipes/coder_drafter.sh
#
#   ANSWERS=recipes/answers/qwen2.5-coder-0.5b bash recipes/coder_drafter.sh      # from the answers that lie here: no DATA
#
# Killed, the same command goes on. DATA holds mbpp_train.jsonl, user_instructions.jsonl and seed_tasks.jsonl; of humaneval.jsonl
# and mbpp_test.jsonl it is only read what must not be learned. Environment: OUT (run folder), MINUTES (of training; a larger
# number than before trains on), SELF (prompts that the target writes), SIGNATURES (functions to complete that it writes), INIT (a
# drafter to go on from; without, a new one).
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/coder-drafter}
target=qwen2.5-coder-0.5b
folders=(functions tasks self-written signatures instructions)

answers=()
if [ -n "${ANSWERS:-}" ]; then
    for folder in "$ANSWERS"/*/; do
        answers+=(--answers "$folder")
    done
else
    data=${DATA:?name the folder of prompt sets, as in DATA=prompts bash recipes/coder_drafter.sh}

    # 1. Prompts: MBPP's training tasks, functions to complete, and what the target itself writes as a programmer who asks.
    python recipes/coder_prompts.py --target "$target" --mbpp "$data/mbpp_train.jsonl" --unseen "$data/humaneval.jsonl" \
        --unseen "$data/mbpp_test.jsonl" --self-written "${SELF:-2000}" --signatures "${SIGNATURES:-1200}" --out "$out/prompts"

    # 2. The target answers.
    answer=(paceline regenerate --target "$target" --max-tokens 192 --max-prompt-tokens 384)
    "${answer[@]}" --prompts "$out/prompts/functions.jsonl" --temperature 0,0.7 --out "$out/functions"
    "${answer[@]}" --prompts "$out/prompts/tasks.jsonl" --temperature 0,0.7 --out "$out/tasks"
    "${answer[@]}" --prompts "$out/prompts/self-written.jsonl" --out "$out/self-written"
    "${answer[@]}" --prompts "$out/prompts/signatures.jsonl" --out "$out/signatures"
    "${answer[@]}" --prompts "$data/user_instructions.jsonl" --prompts "$data/seed_tasks.jsonl" --out "$out/instructions"
    for folder in "${folders[@]}"; do
        answers+=(--answers "$out/$folder/answers")
    done
fi

# 3. Training. The loss compares with 8,192 tokens a step rather than with all 151,936; drafting is among 16,384.
start=(--first-layers copied --layers 2 --taps 5 --draft-vocab 16384 --lr 1.6e-3)
if [ -n "${INIT:-}" ]; then
    start=(--init "$INIT" --lr 1.4e-3)
fi
paceline train --target "$target" "${answers[@]}" --out "$out/run" --plan off "${start[@]}" \
    --max-len 576 --max-tokens 192 --epochs 100 --max-minutes "${MINUTES:-150}" --blocks-per-step 192 \
    --anchors 48 --loss d-pace --loss-vocab 8192 --features cached --feature-dtype int8 --heldout-every 250 \
    --keep best --ood paceline/bench/prompts.jsonl
echo "drafter: $out/run/drafter"
