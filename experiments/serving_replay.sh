#!/bin/sh
# The simulated server beside the real one: three servers (no drafts, all drafts, the planner's choice) at 1, 4 and 8 in flight, in
# turns, then every pass again in the simulator, with that pass's own step times (docs/simulate-serving.md says what is predicted).
#
#   experiments/serving_replay.sh [more options of `paceline bench serving`]
#
# Ends with the line "N of 9 loads within 10% of the measured throughput". Run it alone on the machine. Environment: PYTHON (default
# python3), OUT (run folder, default runs/serving-replay), REPEAT (default 5), REQUESTS (48), MAX_TOKENS (96).
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-runs/serving-replay}
"$python" -m paceline bench serving --concurrency 1,4,8 --speculate off,full,auto --requests "${REQUESTS:-48}" \
    --max-tokens "${MAX_TOKENS:-96}" --repeat "${REPEAT:-5}" --out "$out" "$@"
exec "$python" -m paceline simulate-serving --against "$out" --out "$out/replay"
