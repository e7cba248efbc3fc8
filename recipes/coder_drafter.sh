#!/usr/bin/env bash
# The drafter of qwen2.5-coder-0.5b, from prompts to a checkpoint, on two CPU cores or a GPU.
#
#   DATA=path/to/prompt/sets bash recipes/coder_drafter.sh
#
#   ANSWERS=recipes/answers/qwen2.5-coder-0.5b bash recipes/coder_drafter.sh      # from the answers that lie here: no DATA
#
# Killed, the same command goes on. DATA holds mbpp_train.jsonl, user_instructions.jsonl and seed_tasks.jsonl; of humaneval.jsonl
# and mbpp_test.jsonl it is only read what must not be learned. Environment: OUT (run folder), MINUTES and SECOND_MINUTES (of
# training; a larger number than before trains on), SELF (prompts that the target writes), SIGNATURES (functions to complete that
# it writes), INIT (a DFlash drafter that step 4 goes on from, in place of step 3's), PROCESSES.
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
learn=(--target "$target" "${answers[@]}" --plan off --max-len 576 --max-tokens 192 --epochs 100 --blocks-per-step 192
    --anchors 48 --loss d-pace --loss-vocab 8192 --features cached --feature-dtype int8 --ood paceline/bench/prompts.jsonl)
first=${INIT:-$out/run/drafter}
if [ -z "${INIT:-}" ]; then
    paceline train "${learn[@]}" --out "$out/run" --first-layers copied --layers 2 --taps 5 --draft-vocab 16384 --lr 1.6e-3 \
        --max-minutes "${MINUTES:-150}" --heldout-every 250 --keep best
fi

# 4. From there on DFlash 2, in processes of one thread each, and 8 bits, without the codebook rows of tokens that it does not
# draft. What drafters/ holds (48 minutes on two cores, from a drafter that had learned for 89: its card). Its window of 256
# positions was set after the training: documents have at most 576 tokens, and behind longer contexts it drafts better so.
OMP_NUM_THREADS=1 torchrun --nproc-per-node "${PROCESSES:-$(nproc)}" -m paceline train "${learn[@]}" --out "$out/second" \
    --init "$first" --drafter-kind dflash2 --lr 1.3e-3 --max-minutes "${SECOND_MINUTES:-48}" --heldout-every 500 \
    --selector-from 0.2 --serve-share 0.03 --sliding-window 256
python recipes/pack_drafter.py "$out/second/drafter" --out "$out/shipped"
echo "drafter: $out/shipped"
