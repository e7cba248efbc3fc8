#!/bin/sh
# Decoding speed on CPU beside llama.cpp, Transformers and vLLM, one stream and eight; prints tables of ratios and writes
# experiments/results/decode_vs_peers_cpu_<date>.json. Run it on an idle machine.
#
#   experiments/decode_vs_peers.sh --prompts gsm8k_test.jsonl --limit 8 [more options of experiments/decode_vs_peers.py]
#
# Needs a C++ compiler and a package index; building llama.cpp takes some ten minutes of one core. Environment: PEERS_VENV (where
# the peers are installed and kept), JOBS (compilers at once, default 2), PEERS (those to install: "llama.cpp vllm"; Transformers
# is among our own requirements), THREADS (default 2).
set -eu
cd "$(dirname "$0")/.."

. experiments/peers.sh
install_peers ${PEERS:-llama.cpp vllm}

export LLAMA_CPP_LIB_PATH="$venv/llama.cpp/bin" PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$venv/bin/python" experiments/decode_vs_peers.py --threads "${THREADS:-2}" "$@"
