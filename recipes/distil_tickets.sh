#!/usr/bin/env bash
# A smaller model for one application, and a drafter for it: a shop's support desk whose model answers tickets in JSON.
#
#   bash recipes/distil_tickets.sh
#
# The teacher answers tickets; some of its own layers learn to answer as it does; gates on tickets that were held out decide
# whether the student is kept (exit status 3 when it is refused); then the student answers the tickets itself, and its drafter
# learns from that. Killed, the same command goes on. Needs pip install 'paceline[distill]'.
#
# Environment: OUT (run folder), TEACHER, LAYERS or KEEP (as 0,1,2,29), METHOD (hard, soft, gkd), EMBEDDING (q4_1, or same), MINUTES (of the student's
# training), DRAFTER_MINUTES (0: no drafter), TICKETS, HELDOUT.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-runs/distil-tickets}
teacher=${TEACHER:-smollm2-135m}
minutes=${MINUTES:-20}
drafter_minutes=${DRAFTER_MINUTES:-8}
layers=(--layers "${LAYERS:-12}")
if [ -n "${KEEP:-}" ]; then
    layers=(--keep-layers "$KEEP")
fi
mkdir -p "$out"

echo "== tickets" >&2
python recipes/support_tickets.py --train "${TICKETS:-1500}" --heldout "${HELDOUT:-100}" --out "$out/tickets"

echo "== the teacher answers" >&2
paceline regenerate --target "$teacher" --prompts "$out/tickets/train.jsonl" --out "$out/answers" --max-tokens 128

echo "== the student" >&2
paceline distill --teacher "$teacher" --answers "$out/answers/answers" "${layers[@]}" --method "${METHOD:-soft}" --embedding-format "${EMBEDDING:-q4_1}" \
    --minutes "$minutes" --out "$out/student"

if [ "$drafter_minutes" != 0 ]; then
    echo "== its drafter" >&2
    paceline train --target "$out/student/student.gguf" --prompts "$out/tickets/train.jsonl" --out "$out/drafter" \
        --max-len 512 --max-tokens 128 --max-minutes "$drafter_minutes" --epochs 20 --blocks-per-step 192 --anchors 48 \
        --lr 1e-3 --loss-vocab 8192 --features cached
    paceline evaluate "$out/drafter/drafter" --target "$out/student/student.gguf" --prompts "$out/tickets/heldout.jsonl" \
        --batch 1 --temperature 0 --max-tokens 128 --out "$out/evaluation"
fi
