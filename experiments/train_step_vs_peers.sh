#!/bin/sh
# Our DFlash training step beside SpecForge's and speculators' on the same machine and settings; prints a table of ratios.
#
#   experiments/train_step_vs_peers.sh [more options of experiments/train_step_vs_peers.py]
#
# Needs an idle machine and a package index. Environment: WORK (a folder for the peers' environments, kept; default a new
# temporary one), RESULTS (JSON lines, default $WORK/results.jsonl), PYTHON (with paceline installed), SIDES, DTYPES, LENGTHS,
# ANCHORS, THREADS, ROUNDS (the sides take turns in each). Run again with the same WORK and `--compile`, the table takes each
# side's best.
set -eu
cd "$(dirname "$0")/.."

work=${WORK:-$(mktemp -d)}
results=${RESULTS:-$work/results.jsonl}
python=${PYTHON:-python}
export OMP_NUM_THREADS="${THREADS:-2}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# environment NAME PACKAGE DEPENDENCIES...: torch is pinned in every call, so that no other build replaces it.
environment() {
    folder=$work/$1 package=$2
    shift 2
    [ -e "$folder/ready" ] && return
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet torch==2.13.0
    "$folder/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 "$@"
    "$folder/bin/pip" install --quiet --no-deps "$package"
    touch "$folder/ready"
}

sides=${SIDES:-paceline specforge speculators}
for side in $sides; do
    case $side in
        specforge) environment specforge specforge==0.2.0 numpy ;;
        speculators)
            environment speculators speculators==0.9.0 numpy openai httpx aiohttp datasets click hs-connectors==0.9.0 \
                loguru pydantic pydantic-settings rich tqdm
            ;;
    esac
done

echo "results: $results" >&2
for round in $(seq "${ROUNDS:-1}"); do
    for dtype in ${DTYPES:-bfloat16 float32}; do
        for length in ${LENGTHS:-256}; do
            for anchors in ${ANCHORS:-64 128 256}; do
                for side in $sides; do
                    [ "$side" = paceline ] && runner=$python || runner=$work/$side/bin/python
                    echo "round $round: $side, $dtype, length $length, $anchors anchors" >&2
                    "$runner" experiments/train_step_vs_peers.py --side "$side" --threads "$OMP_NUM_THREADS" --dtype "$dtype" \
                        --length "$length" --anchors "$anchors" "$@" >>"$results" || echo "$side: no figure" >&2
                done
            done
        done
    done
done
"$python" experiments/train_step_vs_peers.py --table "$results"
