#!/bin/sh
# Servers side by side on CPU, one stream and eight: paceline serve with and without its drafter beside vLLM's server and
# llama-cpp-python's; prints a table of ratios, writes bench/results/serving_vs_peers_cpu_<date>.json. Run it on an idle machine.
#
#   bench/serving_vs_peers.sh --prompts gsm8k_test.jsonl [more options of bench/serving_vs_peers.py]
#
# Needs a C++ compiler and a package index; building llama.cpp takes some ten minutes of one core. Environment: PEERS_VENV (where
# the peers are installed and kept), JOBS (compilers at once, default 2), PEERS (those to install: "llama.cpp llama-server vllm"),
# THREADS (default 2).
set -eu
cd "$(dirname "$0")/.."

. bench/peers.sh
# shellcheck disable=SC2086
install_peers ${PEERS:-llama.cpp llama-server vllm}

export LLAMA_CPP_LIB_PATH="$venv/llama.cpp/bin" PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$venv/bin/python" bench/serving_vs_peers.py --threads "${THREADS:-2}" "$@"
