#!/usr/bin/env bash
# How many drafts a round: DFlash drafters with blocks of 4, 8 and 16 (3, 7 and 15 drafts) beside EAGLE-3 drafters that learn and draft
# as many, trained from nothing on the same answers for the same time. Acceptance length and speed, with all drafts checked and as
# the planner chooses.
#
#   ANSWERS=runs/tickets/answers PROMPTS=unseen.jsonl bash experiments/draft_lengths.sh
#
# ANSWERS are folders of answers (paceline regenerate), PROMPTS other requests of that workload. Killed, the same command goes on after
# the last finished stage. Environment: OUT (folder), TARGET (smollm2-135m), LENGTHS (3 7 15), MINUTES (4, of steps each), LIMIT
# (prompts, 20), REPEAT (turns, 3). Rates are those of drafters_side_by_side.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/draft-lengths}
target=${TARGET:-smollm2-135m}
lengths=${LENGTHS:-3 7 15}
answers=()
for folder in ${ANSWERS:?name folders of answers, as in ANSWERS=runs/tickets/answers}; do
    answers+=(--answers "$folder")
done
prompts=()
for file in ${PROMPTS:?name files of prompts that no drafter learned from, as in PROMPTS=unseen.jsonl}; do
    prompts+=(--prompts "$file")
done

train=(paceline train --target "$target" "${answers[@]}" --plan off --max-len 512 --max-tokens 128 --epochs 1000
    --max-minutes "${MINUTES:-4}" --blocks-per-step 192 --anchors 48 --features cached --shared-features "$out/features"
    --heldout-every 250 --serve-share 0 --draft-vocab 12288)
for k in $lengths; do
    "${train[@]}" --out "$out/dflash-$k" --block-size $((k + 1)) --lr 2e-3 --first-layers copied --loss d-pace \
        --loss-vocab 8192
    "${train[@]}" --out "$out/eagle3-$k" --drafter-kind eagle3 --ttt-steps "$k" --lr 7e-4
done

for speculate in full auto; do
    for k in $lengths; do
        folder=$out/$speculate-$k
        if [ -e "$folder/.done" ]; then continue; fi
        rm -rf "${folder:?}"
        number=()
        if [ "$speculate" = full ]; then number=(--num-drafted "$k"); fi
        paceline bench decode --model "$target" --drafters "none,$out/dflash-$k/drafter,$out/eagle3-$k/drafter" \
            --speculate "$speculate" "${number[@]}" "${prompts[@]}" --limit "${LIMIT:-20}" --max-tokens 96 --batch 1 \
            --repeat "${REPEAT:-3}" --out "$folder"
        touch "$folder/.done"
    done
done
