#!/bin/sh
# Servers side by side on CPU, one stream and eight: paceline serve with and without its drafter beside vLLM's server and
# llama-cpp-python's; prints a table of ratios, writes experiments/results/serving_vs_peers_cpu_<date>.json. Run it on an idle machine.
#
#   experiments/serving_vs_peers.sh --prompts gsm8k_test.jsonl [more options of experiments/serving_vs_peers.py]
#
# Needs a C++ compiler and a package index; building llama.cpp takes some ten minutes of one core. Environment: PEERS_VENV (where
# the peers are installed and kept), JOBS (compilers at once, default 2), PEERS (those to install: "llama.cpp llama-server vllm"),
# THREADS (default 2).
set -eu
cd "$(dirname "$0")/.."

. experiments/peers.sh
# shellcheck disable=SC2086
install_peers ${PEERS:-llama.cpp llama-server vllm}

export LLAMA_CPP_LIB_PATH="$venv/llama.cpp/bin" PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$venv/bin/python" experiments/serving_vs_peers.py --threads "${THREADS:-2}" "$@"
