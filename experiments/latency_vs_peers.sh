#!/bin/sh
# Where the milliseconds go, servers side by side on CPU: paceline serve with and without its drafter beside vLLM's server and
# llama-cpp-python's. The report is in runs/latency-vs-peers, or --out. Run it on an idle machine.
#
#   experiments/latency_vs_peers.sh --workload voice [more options of experiments/latency_vs_peers.py]
#
# Needs and environment as of experiments/serving_vs_peers.sh: PEERS_VENV, JOBS, PEERS, THREADS.
set -eu
cd "$(dirname "$0")/.."

. experiments/peers.sh
# shellcheck disable=SC2086
install_peers ${PEERS:-llama.cpp llama-server vllm}

export LLAMA_CPP_LIB_PATH="$venv/llama.cpp/bin" PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$venv/bin/python" experiments/latency_vs_peers.py --threads "${THREADS:-2}" "$@"
