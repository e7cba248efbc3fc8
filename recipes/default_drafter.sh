#!/usr/bin/env bash
# The default drafter of smollm2-135m, from prompts to a checkpoint, on two CPU cores (about ten hours) or a GPU.
#
#   DATA=path/to/prompt/sets MANUALS=unpacked NEWS=test_data CLUES=builds bash recipes/default_drafter.sh
#
# Killed, the same command goes on. DATA holds gsm8k_train.jsonl, mbpp_train.jsonl, t0_tasks.jsonl, user_instructions.jsonl and
# seed_tasks.jsonl. Nothing of a test set is read. Environment: OUT (run folder), MINUTES, MORE_MINUTES,
# SECOND_MINUTES to EIGHTH_MINUTES (of training), FORTUNES, MANUALS, NEWS, CLUES, PROCESSES.
set -euo pipefail
cd "$(dirname "$0")/.."

data=${DATA:?name the folder of prompt sets, as in DATA=prompts bash recipes/default_drafter.sh}
what="see recipes/manual_prompts.py"
manuals=${MANUALS:?name the folder of unpacked manuals, $what} news=${NEWS:?name the folder of news, $what}
clues=${CLUES:?name the folder of quiz clues, $what}
out=${OUT:-runs/default-drafter}
target=smollm2-135m

# Two processes of one thread each: no operation waits for the other core.
processes=${PROCESSES:-$(nproc)}
export OMP_NUM_THREADS=1
many=(torchrun --nproc-per-node "$processes" -m paceline)
answer=("${many[@]}" regenerate --target "$target" --max-tokens 160 --max-prompt-tokens 384)

# 1. Prompts of our own: functions to write, questions of many kinds, beginnings for what the target writes itself.
python recipes/default_prompts.py --mbpp "$data/mbpp_train.jsonl" --out "$out/prompts"

# 2. The target answers: 870,000 tokens, mostly greedy.
"${answer[@]}" --prompts "$data/gsm8k_train.jsonl" --limit 2500 --out "$out/arithmetic"
"${answer[@]}" --prompts "$out/prompts/kinds.jsonl" --limit 700 --out "$out/kinds"
"${answer[@]}" --prompts "$data/t0_tasks.jsonl" --limit 500 --out "$out/tasks"
"${answer[@]}" --prompts "$data/mbpp_train.jsonl" --prompts "$data/user_instructions.jsonl" \
    --prompts "$data/seed_tasks.jsonl" --out "$out/instructions"
"${answer[@]}" --prompts "$out/prompts/functions.jsonl" --temperature 0,0.7 --out "$out/functions"
"${answer[@]}" --self-written 1000 --openers "$out/prompts/openers.txt" --out "$out/self-written"

# 3. Training. The loss compares with 8,192 tokens a step rather than with all 49,152; held-out figures use all.
answers=()
for folder in arithmetic kinds tasks instructions functions self-written; do
    answers+=(--answers "$out/$folder/answers")
done
"${many[@]}" train --target "$target" "${answers[@]}" --out "$out/run" --plan off --first-layers copied --max-len 512 --max-tokens 128 \
    --epochs 20 --max-minutes "${MINUTES:-50}" --blocks-per-step 192 --anchors 48 --lr 2e-3 --loss d-pace --loss-vocab 8192 \
    --features cached --heldout-every 250 --ood paceline/bench/prompts.jsonl
# 4. The same once more, from what was learned: a sixtieth more tokens per round on held-out answers, more on others.
"${many[@]}" train --target "$target" "${answers[@]}" --out "$out/again" --init "$out/run/drafter" --max-len 512 --max-tokens 128 \
    --epochs 30 --max-minutes "${MORE_MINUTES:-75}" --blocks-per-step 192 --anchors 48 --lr 1.5e-3 --loss d-pace \
    --loss-vocab 8192 --features cached --heldout-every 250 --ood paceline/bench/prompts.jsonl

# 5. More answers: other questions, and programming prompts that another model wrote.
python recipes/prompts_of_answers.py --target qwen2.5-coder-0.5b --answers recipes/answers/qwen2.5-coder-0.5b \
    --leave-out functions tasks --out "$out/prompts/code.jsonl"
"${answer[@]}" --prompts "$data/gsm8k_train.jsonl" --limit 4500 --out "$out/arithmetic"
"${answer[@]}" --prompts "$out/prompts/code.jsonl" --out "$out/code"
answers+=(--answers "$out/code/answers")

# 6. From there on DFlash 2, with all answers.
"${many[@]}" train --target "$target" "${answers[@]}" --out "$out/second" --plan off --init "$out/again/drafter" \
    --drafter-kind dflash2 --max-len 512 --max-tokens 128 --epochs 30 --max-minutes "${SECOND_MINUTES:-26}" --blocks-per-step 192 \
    --anchors 48 --lr 1.3e-3 --loss d-pace --loss-vocab 8192 --features cached --heldout-every 500 --keep best \
    --selector-from 0.2 --ood paceline/bench/prompts.jsonl

# 7. The tokens that answers use most.
python recipes/draft_vocabulary.py "${answers[@]}" --drafter "$out/second/drafter" --size 12288

# 8. All of the questions and tasks there are, and twice as many prompts that the target writes itself; from step 6 on, the selector
# learning all along. Then 8 bits, which leave out codebook rows of tokens that it does not draft. What drafters/ holds began its
# training from 8 bits too, and was packed when those rows still stayed; its window of 256 positions was set afterwards: behind
# contexts longer than the documents of the training it drafts better so.
"${answer[@]}" --prompts "$data/gsm8k_train.jsonl" --limit 7400 --out "$out/arithmetic"
"${answer[@]}" --prompts "$data/t0_tasks.jsonl" --limit 1571 --out "$out/tasks"
"${answer[@]}" --self-written 2000 --openers "$out/prompts/openers.txt" --out "$out/self-written"
"${many[@]}" train --target "$target" "${answers[@]}" --out "$out/third" --plan off --init "$out/second/drafter" --max-len 512 \
    --max-tokens 128 --epochs 30 --max-minutes "${THIRD_MINUTES:-43}" --blocks-per-step 192 --anchors 48 --lr 1.3e-3 --loss d-pace \
    --loss-vocab 8192 --features cached --heldout-every 500 --keep best --selector-from 0 --ood paceline/bench/prompts.jsonl \
    --sliding-window 256

# 9. General text: translations, questions about facts, summaries, and questions about passages; for these a wider draft
# vocabulary, and documents of up to 1,344 tokens. The sentences are of Debian's fortunes-de, -es, -it and -br.
fortunes=${FORTUNES:-/usr/share/games/fortunes}
python recipes/general_prompts.py --sentences "German=$fortunes/de" --sentences "Spanish=$fortunes/es" \
    --sentences "Italian=$fortunes/it" --sentences "Portuguese=$fortunes/brasil" --out "$out/general"
write=("${many[@]}" regenerate --target "$target")
"${write[@]}" --prompts "$out/general/articles.jsonl" --temperature 0.8 --max-tokens 480 --out "$out/articles"
"${write[@]}" --prompts "$out/general/paragraphs.jsonl" --temperature 0.7 --max-tokens 160 --out "$out/paragraphs"
python recipes/general_prompts.py --articles "$out/articles/answers" --paragraphs "$out/paragraphs/answers" \
    --out "$out/general"
"${answer[@]}" --prompts "$out/general/translations.jsonl" --out "$out/translations"
"${answer[@]}" --self-written 900 --openers "$out/general/openers.txt" --out "$out/facts"
"${write[@]}" --prompts "$out/general/summaries.jsonl" --prompts "$out/general/passages.jsonl" --max-tokens 160 \
    --max-prompt-tokens 1200 --out "$out/long"
for folder in translations facts long; do
    answers+=(--answers "$out/$folder/answers")
done
python recipes/draft_vocabulary.py "${answers[@]}" --drafter "$out/third/drafter" --out "$out/wider" --first 16000
"${many[@]}" train --target "$target" "${answers[@]}" --out "$out/fourth" --plan off --init "$out/wider" \
    --max-len 1344 --max-tokens 160 --epochs 1000 --max-minutes "${FOURTH_MINUTES:-47}" --blocks-per-step 192 --anchors 48 \
    --lr 1e-3 --loss d-pace --loss-vocab 8192 --features cached --heldout-every 250 --keep best --selector-from 0 --serve-share 0

# 10. Halfway between the two: what the new texts bring, and no less on arithmetic and code than before.
halfway() {
    python -c "import sys; from pathlib import Path; from paceline.draft.formats.blend import blended
before, trained, out = map(Path, sys.argv[1:]); blended(before, trained, 0.5, out)" "$@"
}
halfway "$out/wider" "$out/fourth/drafter" "$out/blended"

# 11. Further from there and, with more answers of arithmetic and of many kinds, from the mean of both trainings; at half of
# the step size, and with a window of 1,024 positions: summaries take their words from far back. (What drafters/ holds
# learned in steps 9 and 11 from new answers alone, 7,128 of them in the end; its card says how many of which kind.)
general=(train --target "$target" "${answers[@]}" --plan off --max-len 1344 --max-tokens 160 --epochs 1000 --blocks-per-step 192
    --anchors 48 --loss d-pace --loss-vocab 8192 --features cached --heldout-every 500 --keep best --selector-from 0
    --serve-share 0 --shared-features "$out/features")
"${many[@]}" "${general[@]}" --out "$out/fifth" --init "$out/blended" --max-minutes "${FIFTH_MINUTES:-38}" --lr 1.3e-3
halfway "$out/fourth/drafter" "$out/fifth/drafter" "$out/mean"
"${many[@]}" "${general[@]}" --out "$out/sixth" --init "$out/mean" --max-minutes "${SIXTH_MINUTES:-55}" --lr 7e-4 \
    --sliding-window 1024

# 12. Halfway back to step 10. (A window of 512 shipped then: behind 2,000 and 6,000 tokens, longer than all documents of the
# training, 1,024 costs a twentieth and more; 512 nothing, and summaries a hundredth.)
windowed() {
    python -c "import json, shutil, sys; from pathlib import Path
shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True); path = Path(sys.argv[2], 'config.json')
path.write_text(json.dumps(json.loads(path.read_text()) | {'sliding_window': int(sys.argv[3])}, indent=2))" "$@"
}
windowed "$out/blended" "$out/w1024" 1024
halfway "$out/w1024" "$out/sixth/drafter" "$out/last"

# 13. More of general text: manuals, dictionaries and news. (recipes/manual_prompts.py says what MANUALS, NEWS and CLUES hold.) Then
# halfway back, and a window of 512.
python recipes/manual_prompts.py --root "$manuals" --news "$news" --clues "$clues" --out "$out/manuals"
for name in translations facts; do
    "${answer[@]}" --prompts "$out/manuals/$name.jsonl" --out "$out/manual-$name"
done
"${write[@]}" --prompts "$out/manuals/summaries.jsonl" --prompts "$out/manuals/passages.jsonl" --max-tokens 160 \
    --max-prompt-tokens 1200 --limit 1275 --out "$out/manual-long"
"${write[@]}" --max-tokens 160 --self-written 1200 --openers "$out/general/openers.txt" --seed 6 --out "$out/manual-questions"
"${write[@]}" --max-tokens 160 --self-written 1200 --openers "$out/manuals/openers.txt" --seed 7 --out "$out/manual-written"
for folder in translations facts long questions written; do
    general+=(--answers "$out/manual-$folder/answers")
done
"${many[@]}" "${general[@]}" --out "$out/seventh" --init "$out/last" --max-minutes "${SEVENTH_MINUTES:-36}" --lr 1e-3 \
    --sliding-window 1024
"${many[@]}" "${general[@]}" --out "$out/eighth" --init "$out/seventh/drafter" --seed 22 --max-minutes "${EIGHTH_MINUTES:-80}" \
    --lr 1e-3 --sliding-window 1024
halfway "$out/last" "$out/eighth/drafter" "$out/newest"
windowed "$out/newest" "$out/newest-w512" 512
python recipes/pack_drafter.py "$out/newest-w512" --out "$out/shipped"
echo "drafter: $out/shipped"
