#!/bin/sh
# Does vLLM's CPU build draft with our exported drafter as our own engine does? Both formats, greedy, float32: texts and tokens a
# round. Prints a table and writes experiments/results/vllm_serves_export_cpu_<date>.json; exit status 1 where they differ.
# Optional: not part of the test suite; needs a package index, 3.5 GB and some minutes.
#
#   experiments/vllm_serves_export.sh --prompts gsm8k_test.jsonl [--model smollm2-135m --drafter path/to/folder]
#
# vLLM 0.32 on a CPU runs DFlash drafters, and no DFlash 2. Environment: PEERS_VENV (where vLLM is installed and kept).
set -eu
cd "$(dirname "$0")/.."

. experiments/peers.sh
install_peers vllm

export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$venv/bin/python" experiments/vllm_serves_export.py --peers-home "$venv" "$@"
