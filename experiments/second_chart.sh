#!/usr/bin/env bash
# Speed-up over tokens a round, from this machine's own measurements, on two models: y = x, the roofline fitted to measured step
# times, mocked acceptance in the real engine, and real drafters. Draws a picture and prints the slopes of each.
#
#   DATA=path/to/prompt/sets bash experiments/second_chart.sh
#
# About twenty minutes on two cores, with nothing else running. Killed, the same command goes on after the last finished stage.
# Environment: OUT (folder), MODELS ("smollm2-135m qwen2.5-coder-0.5b"), LIMIT (prompts a file, 8), REPEAT (turns, 3), DRAFTERS
# (none,default,ngram; folders of trained drafters of one model too, such as an MTP layer and a DFlash drafter).
set -euo pipefail
cd "$(dirname "$0")/.."

data=${DATA:?name the folder of prompt sets, as in DATA=prompts bash experiments/second_chart.sh}
out=${OUT:-runs/second-chart}
limit=${LIMIT:-8}
repeat=${REPEAT:-3}

stage() {  # stage NAME COMMAND...: unless an earlier run finished it; --out is added
    local folder=$out/$model/$1
    shift
    if [ -e "$folder/.done" ]; then return; fi
    rm -rf "$folder"
    "$@" --model "$model" --out "$folder"
    touch "$folder/.done"
}

for model in ${MODELS:-smollm2-135m qwen2.5-coder-0.5b}; do
    # Mocked rounds draft with what ships for the model, else with a DFlash drafter of random weights: its cost is calibrated.
    drafter=random-dflash
    if [ -d "drafters/paceline_drafters/$model" ]; then drafter=default; fi
    stage steps paceline bench steps --drafter "$drafter" --batch 1 --positions 9 --context 200
    if [ ! -e "$out/$model/steps/calibration.json" ]; then paceline simulate --calibrate "$out/$model/steps"; fi
    stage mock paceline bench decode --mock-tokens-per-round 1,2,3,4,6,8 --mock-prompt-tokens 200 --max-tokens 96 --repeat "$repeat"
    case $model in
        *coder*) prompts="$data/humaneval.jsonl experiments/prompts_edit.jsonl" ;;
        *) prompts="$data/gsm8k_test.jsonl $data/mt_bench.jsonl experiments/prompts_edit.jsonl" ;;
    esac
    results=()
    for file in $prompts; do
        name=$(basename "$file" .jsonl)
        stage "$name" paceline bench decode --prompts "$file" --limit "$limit" --drafters "${DRAFTERS:-none,default,ngram}" --max-tokens 96 \
            --repeat "$repeat"
        results+=(--results "$out/$model/$name")
    done
    paceline compare --simulate --model "$model" --calibration "$out/$model/steps" --context 200 --results "$out/$model/mock" \
        "${results[@]}" --svg "$out/$model/speedup.svg" --png "$out/$model/speedup.png" --out "$out/$model/chart"
done
