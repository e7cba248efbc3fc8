#!/bin/sh
# Decoding speed on CPU beside llama.cpp, Transformers and vLLM, each plain and with its own speculation, one stream and eight;
# prints tables of ratios and writes experiments/results/decode_vs_peers_cpu_<date>.json. Run it on an idle machine.
#
#   experiments/decode_vs_peers.sh --prompts gsm8k_test.jsonl [more options of experiments/decode_vs_peers.py]
#
# Needs a C++ compiler and a package index; building llama.cpp takes some twenty minutes of one core. Environment: PEERS_VENV
# (where the peers are installed and kept), JOBS (compilers at once, default 2), PEERS (those to install: "llama.cpp vllm" or
# "none"; Transformers is among our own requirements), LLAMA_FLAGS (instead of what the processor says), THREADS (default 2).
set -eu
cd "$(dirname "$0")/.."

. experiments/peers.sh
# shellcheck disable=SC2086
install_peers ${PEERS:-llama.cpp vllm}

export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$venv/bin/python" experiments/decode_vs_peers.py --peers-home "$venv" --threads "${THREADS:-2}" "$@"
