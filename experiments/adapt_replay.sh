#!/bin/sh
# The policies of `paceline adapt` over virtual fortnights with a known truth: every scenario with ours, two bases with the naive one.
#
#   experiments/adapt_replay.sh
#
# A JSON line each; it takes some minutes on one thread. Environment: PYTHON (default python3), SEEDS (default 200), FIRST_SEED
# (default 0: thresholds were looked at with seeds from 1000 on only,
# but the prior of the autocorrelation, on 2026-11-28, with seeds 0 to 23 and 50,000 to 50,023: take others to judge it).
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} seeds=${SEEDS:-200} first=${FIRST_SEED:-0}
"$python" -m paceline adapt replay --scenario two-bases --policy naive --seeds "$seeds" --first-seed "$first" --json
for scenario in two-bases slow-drift new-schema weekend noise empty-day two-bases-drift; do
    "$python" -m paceline adapt replay --scenario "$scenario" --policy seasonal --seeds "$seeds" --first-seed "$first" --json
done
