#!/bin/bash
# Lossy rules beside the lossless lane and plain decoding, on two tasks: support tickets by their JSON fields, HumanEval by running
# the code. Writes report.md, results.json, texts.json and pareto.svg into OUT. About ten minutes on two cores.
#
#     bash experiments/lossy_pareto.sh HUMANEVAL.jsonl [OUT] [LIMIT] [DRAFTER]
#
# HUMANEVAL.jsonl is openai/human-eval's file: task_id, prompt, entry_point, test. DRAFTER may be the folder that
# recipes/custom_workload.sh trained for the tickets; without, the drafter that ships with the model.
set -euo pipefail
cd "$(dirname "$0")/.."
humaneval=${1:?give the JSON lines of HumanEval}
out=${2:-runs/lossy-pareto}
limit=${3:-12}
drafter=${4:-default}
mkdir -p "$out"
python recipes/support_tickets.py --train 1 --heldout "$limit" --out "$out/tickets"
paceline bench lossy --model smollm2-135m --drafter "$drafter" \
    --tasks "tickets=$out/tickets/heldout.jsonl,humaneval=$humaneval" \
    --settings "typical:eps=0.3,delta=0.3;relaxed:n=2,delta=0.3;relaxed:n=10,delta=0.6;threshold:0.3;lenience:0.5;mixture:0.8;lenience:0.3,max_tv=0.02" \
    --limit "$limit" --max-tokens 128 --repeat 2 --out "$out" --json
