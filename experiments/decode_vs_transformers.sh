#!/bin/sh
# Decoding speed beside Transformers' own generate in the same process; writes experiments/results/decode_<device>_<date>.json.
# Run it on an idle machine: experiments/decode_vs_transformers.sh [more options of `paceline bench decode`]
set -eu
cd "$(dirname "$0")/.."
exec python -m paceline bench decode --against transformers --drafters none,ngram,default --repeat 3 --max-tokens 128 \
    --save-results experiments/results "$@"
