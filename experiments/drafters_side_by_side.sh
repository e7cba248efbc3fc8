#!/usr/bin/env bash
# Drafters of several kinds for one target, side by side: lookups (n-gram), a small model (some of the target's own layers, taught
# by `paceline distill`), EAGLE-3, an MTP layer, DFlash, DFlash 2 and DSpark, trained on the same answers for the same time. Tokens a
# round, what drafting takes, and speed, as a table.
#
#   DATA=path/to/prompt/sets bash experiments/drafters_side_by_side.sh
#   ANSWERS="runs/a/answers runs/b/answers" PROMPTS="questions.jsonl tasks.jsonl" bash experiments/drafters_side_by_side.sh
#
# DATA holds gsm8k_train.jsonl, mbpp_train.jsonl and user_instructions.jsonl, which the target answers first, and gsm8k_test.jsonl
# and humaneval.jsonl, on which is measured; ANSWERS and PROMPTS are others in their place. Each kind learns for MINUTES (8) of
# steps, as its own recipe says; hidden states come on top, three times: EAGLE-3 and MTP read other layers. Then three measurements with nothing
# else running: `full` has every draft of every round checked, `tree:32` the likeliest 32 of those that can be told from each
# other, `auto` is the planner's choice. About 80 minutes on two cores. Killed, the same command goes on after the last finished
# stage. Needs pip install 'paceline[distill]'. Environment: OUT (folder), TARGET (smollm2-135m), LIMIT (prompts a file, 12), REPEAT
# (turns, 3), LAYERS (of the small model, 6).
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/drafters-side-by-side}
target=${TARGET:-smollm2-135m}
if [ -z "${ANSWERS:-}" ] || [ -z "${PROMPTS:-}" ]; then
    data=${DATA:?name the folder of prompt sets, as in DATA=prompts, or both ANSWERS and PROMPTS}
fi
if [ -z "${ANSWERS:-}" ]; then
    answer=(paceline regenerate --target "$target" --max-tokens 160 --max-prompt-tokens 384)
    "${answer[@]}" --prompts "$data/gsm8k_train.jsonl" --limit 1000 --out "$out/questions"
    "${answer[@]}" --prompts "$data/mbpp_train.jsonl" --prompts "$data/user_instructions.jsonl" --out "$out/tasks"
fi
answers=${ANSWERS:-$out/questions/answers $out/tasks/answers}
prompts=${PROMPTS:-$data/gsm8k_test.jsonl $data/humaneval.jsonl}

of_answers=()
for folder in $answers; do
    of_answers+=(--answers "$folder")
done
train=(paceline train --target "$target" --plan off --max-len 512 --max-tokens 128 --epochs 1000 --max-minutes "${MINUTES:-8}"
    --blocks-per-step 192 --anchors 48 --features cached --heldout-every 250 --serve-share 0
    "${of_answers[@]}")
# A block of 8 each: seven drafts of DFlash's, and of EAGLE-3's and MTP's as many as they learn at once, five drafted when served.
# Rates: of 2e-3, 7e-4 and 3e-4 the second was best for EAGLE-3 after 90 seconds; the first is that of the default drafter's recipe.
# MTP begins with a copy of the target's last layer, as a model without such a layer must; of 1e-3 and 3e-4 the first was better.
copied=(--lr 2e-3 --first-layers copied --loss d-pace --loss-vocab 8192 --draft-vocab 12288)
"${train[@]}" --out "$out/eagle3" --drafter-kind eagle3 --lr 7e-4 --ttt-steps 5 --draft-vocab 12288
"${train[@]}" --out "$out/mtp" --drafter-kind mtp --first-layers copied --lr 1e-3 --ttt-steps 5 --loss-vocab 8192
"${train[@]}" --out "$out/dflash" "${copied[@]}"
for kind in dflash2 dspark; do
    mkdir -p "$out/$kind"
    for folder in "$out"/dflash/features-*; do  # links, not copies
        if [ ! -e "$out/$kind/$(basename "$folder")" ]; then cp -al "$folder" "$out/$kind/"; fi
    done
    "${train[@]}" --out "$out/$kind" "${copied[@]}" --drafter-kind "$kind"
done

# Its gates are for students that answer in the target's place: a drafter is only refused when it learned nothing.
if [ ! -e "$out/small/student.gguf" ]; then
    paceline distill --teacher "$target" "${of_answers[@]}" --layers "${LAYERS:-6}" --max-len 512 --minutes "${MINUTES:-8}" \
        --num-answers 0 --least-agreement 0 --out "$out/small"
fi

drafters=none,ngram,$out/small/student.gguf,$out/eagle3/drafter,$out/mtp/drafter,$out/dflash/drafter,$out/dflash2/drafter,$out/dspark/drafter
files=()
for file in $prompts; do
    files+=(--prompts "$file")
done
for speculate in full tree:32 auto; do
    folder=$out/${speculate%:32}
    if [ -e "$folder/.done" ]; then continue; fi
    rm -rf "${folder:?}"
    repeat=${REPEAT:-3}
    if [ "$speculate" = tree:32 ]; then repeat=1; fi  # what it keeps is the same each time
    paceline bench decode --model "$target" --drafters "$drafters" --speculate "$speculate" "${files[@]}" \
        --limit "${LIMIT:-12}" --max-tokens 128 --batch 1 --repeat "$repeat" --out "$folder"
    touch "$folder/.done"
done
python experiments/drafters_side_by_side.py "$out"
