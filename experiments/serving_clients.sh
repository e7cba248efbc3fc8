#!/bin/sh
# Clients that nobody here wrote, against a running paceline serve: guidellm sweeps to 16 requests in flight and none may fail;
# schemathesis makes requests up from the server's own OpenAPI document and none may end in a status of 500 and above; OpenAI's
# client for Node streams an answer with its usage; sessions are LangChain, litellm and instructor: chats, streams, tools and
# structured output (client_sessions.py). lm-eval has servers of its own, without drafts and with them: twenty questions scored by
# the log-probabilities of their answers, ten lists that the model goes on with; scores and answers have to be equal to the digit.
#
#   experiments/serving_clients.sh                       all five
#   experiments/serving_clients.sh guidellm node         those named
#
# Run it where paceline[serve] is installed. Needs a package index, and node and npm (Debian: apt install nodejs npm) for node.
# Environment: CLIENTS_VENV (where the clients are installed and kept), PYTHON (the one with paceline, default python3), URL (a
# server that runs already), STREAMS (default 1,2,4,8,16), FUZZ_SECONDS (default 180), SERVE (more options of paceline serve).
set -eu
cd "$(dirname "$0")/.."

clients=${*:-guidellm schemathesis node sessions lm_eval}
venv=${CLIENTS_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/paceline-peers/serving-clients}
python=${PYTHON:-python3}
work=$(mktemp -d)
server=
failed=

# once MARK COMMAND: run it unless it has been done in this folder. No ||, &&, if around it: they would switch off -e in it.
once() {
    if [ -e "$venv/$1.ready" ]; then return; fi
    echo "$1, into $venv" >&2
    "install_$1"
    touch "$venv/$1.ready"
}

# with_pip NAME
with_pip() {
    python3 -m venv "$venv/$1"
    "$venv/$1/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps -r "experiments/serving_clients_$1_requirements.txt"
}

install_guidellm() { with_pip guidellm; }
install_schemathesis() { with_pip schemathesis; }
install_sessions() { with_pip sessions; }
install_lm_eval() { with_pip lm_eval; }
install_node() { npm install --silent --no-audit --no-fund --prefix "$venv/node" openai@6.49.0; }

stop() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" || true
        server=
    fi
}

# start NAME OPTION...: a server, and its address in $url
start() {
    log=$work/$1.log
    shift
    "$python" -m paceline serve --port 0 "$@" >"$log" 2>&1 &
    server=$!
    until grep -q '^ready: ' "$log"; do
        if ! kill -0 "$server" 2>/dev/null; then
            cat "$log" >&2
            exit 1
        fi
        sleep 0.2
    done
    url=$(sed -n 's/^listening on \(http[^,]*\),.*/\1/p' "$log")
}

model() { "$python" experiments/serving_clients.py model "$url"; }

run_guidellm() {
    "$python" experiments/serving_clients.py prompts "$work/prompts.jsonl" &&
        "$venv/guidellm/bin/guidellm" run --disable-console --seed kind=static,value=1 \
            --backend "kind=openai_http,target=$url,model=$(model),max_tokens=24" \
            --profile kind=concurrent,streams=1 --override profile.streams "${STREAMS:-1,2,4,8,16}" \
            --constraint kind=max_requests,count=32 --data "kind=json_file,path=$work/prompts.jsonl" \
            --output "kind=json,path=$work/guidellm.json" &&
        "$python" experiments/serving_clients.py sweep "$work/guidellm.json"
}

run_schemathesis() {
    "$venv/schemathesis/bin/schemathesis" run "$url/openapi.json" --checks not_a_server_error --seed 1 --workers 4 \
        --max-time "${FUZZ_SECONDS:-180}" --request-timeout 180 --continue-on-failure --suppress-health-check all --no-color
}

run_node() {
    NODE_PATH="$venv/node/node_modules" node experiments/serving_clients.cjs "$url" "$(model)"
}

run_sessions() {
    LITELLM_LOCAL_MODEL_COST_MAP=True "$venv/sessions/bin/python" experiments/client_sessions.py "$url" "$(model)"
}

# scores NAME OPTION...
scores() {
    name=$1
    shift
    start "$name" --model smollm2-135m --max-len 512 "$@" &&
        HF_HUB_OFFLINE=1 "$venv/lm_eval/bin/python" -m lm_eval run --model local-completions \
            --model_args "model=$(model),base_url=$url/v1/completions,tokenizer=$work/files/tokenizer,max_length=512" \
            --include_path "$work/files/tasks" --tasks choices,lists --output_path "$work/$name" --log_samples >"$work/$name.out" 2>&1 ||
        { cat "$work/$name.out" >&2 && return 1; }
    accepted=$("$python" -c "import sys, urllib.request; print(*[line.split()[-1] for line in urllib.request.urlopen(sys.argv[1] + '/metrics').read().decode().splitlines() if line.startswith('vllm:spec_decode_num_accepted_tokens_total')])" "$url")
    echo "$name: accepted drafts: $accepted"
    stop
}

# In a shell of its own: the server of the other clients goes on. Those started here may fetch the model.
run_lm_eval() (
    unset HF_HUB_OFFLINE
    server=
    trap stop EXIT
    trap 'exit 130' INT TERM
    "$python" experiments/serving_clients.py tasks "$work/files" &&
        scores plain --speculate off &&
        scores drafted --speculate full &&
        "$venv/lm_eval/bin/python" -m pip --disable-pip-version-check list 2>/dev/null | grep -i '^lm.eval ' &&
        "$python" experiments/serving_clients.py compare "$work/plain" "$work/drafted"
)

for client in $clients; do
    case $client in
        guidellm | schemathesis | node | sessions | lm_eval) ;;
        *) echo "error: there is no client $client: choose from guidellm, schemathesis, node, sessions, lm_eval" >&2 && exit 2 ;;
    esac
done
mkdir -p "$venv"
for client in $clients; do once "$client"; done
trap 'stop; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
url=${URL:-}
# Short answers: a request that schemathesis makes up sets no limit of its own, and beside other work on the machine four that
# fill the context take longer than a client waits. Sessions with tools need more room.
length=256
case " $clients " in *" sessions "*) length=1024 ;; esac
# shellcheck disable=SC2086
if [ -z "$url" ] && [ "$clients" != lm_eval ]; then start server --max-len "$length" --default-max-tokens 16 ${SERVE:-}; fi
export HF_HUB_OFFLINE=1 HF_DATASETS_CACHE="$work/datasets"
for client in $clients; do
    if [ "$client" = lm_eval ]; then echo "== $client"; else echo "== $client against $url"; fi
    if "run_$client"; then echo "== $client: ok"; else failed="$failed $client"; fi
done
if [ -n "$server" ] && grep -q '^Traceback' "$work/server.log"; then
    cat "$work/server.log"
    failed="$failed server-log"
fi
if [ -n "$failed" ]; then
    echo "FAILED:$failed" >&2
    exit 1
fi
