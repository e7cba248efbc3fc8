#!/bin/sh
# lm-eval, which nobody here wrote, against paceline serve without drafts and with them: twenty questions scored by the
# log-probabilities of their answers, ten lists that the model goes on with. Scores and answers have to be equal to the digit.
#
#   experiments/lm_eval_scores.sh
#
# Run it where paceline[serve] is installed. Needs a package index once.
# Environment: LM_EVAL_VENV (where lm-eval is installed and kept), PYTHON (the one with paceline, default python3).
set -eu
cd "$(dirname "$0")/.."

venv=${LM_EVAL_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/paceline-peers/lm-eval}
python=${PYTHON:-python3}
work=$(mktemp -d)
server=

stop() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" || true
        server=
    fi
}
trap 'stop; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

if [ ! -e "$venv/ready" ]; then
    echo "lm-eval, into $venv" >&2
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps -r experiments/lm_eval_requirements.txt
    touch "$venv/ready"
fi

# scores NAME OPTION...
scores() {
    name=$1
    shift
    "$python" -m paceline serve --model smollm2-135m --port 0 --max-len 512 "$@" >"$work/$name.log" 2>&1 &
    server=$!
    until grep -q '^ready: ' "$work/$name.log"; do
        if ! kill -0 "$server" 2>/dev/null; then
            cat "$work/$name.log" >&2
            exit 1
        fi
        sleep 0.2
    done
    url=$(sed -n 's/^listening on \(http[^,]*\),.*/\1/p' "$work/$name.log")
    HF_HUB_OFFLINE=1 HF_DATASETS_CACHE="$work/datasets" "$venv/bin/python" -m lm_eval run --model local-completions \
        --model_args "model=$("$python" experiments/serving_clients.py model "$url"),base_url=$url/v1/completions,tokenizer=$work/files/tokenizer,max_length=512" \
        --include_path "$work/files/tasks" --tasks choices,lists --output_path "$work/$name" --log_samples >"$work/$name.out" 2>&1 ||
        { cat "$work/$name.out" >&2 && exit 1; }
    accepted=$("$python" -c "import sys, urllib.request; print(*[line.split()[-1] for line in urllib.request.urlopen(sys.argv[1] + '/metrics').read().decode().splitlines() if line.startswith('vllm:spec_decode_num_accepted_tokens_total')])" "$url")
    echo "$name: accepted drafts: $accepted"
    stop
}

"$python" experiments/lm_eval_scores.py files "$work/files"
scores plain --speculate off
scores drafted --speculate full
"$venv/bin/python" -m pip --disable-pip-version-check list 2>/dev/null | grep -i '^lm.eval '
"$python" experiments/lm_eval_scores.py compare "$work/plain" "$work/drafted"
