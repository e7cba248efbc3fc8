#!/bin/sh
# Clients that nobody here wrote, against a running paceline serve: guidellm sweeps to 16 requests in flight and none may fail;
# schemathesis makes requests up from the server's own OpenAPI document and none may end in a status of 500 and above; OpenAI's
# client for Node streams an answer with its usage; sessions are LangChain, litellm and instructor: chats, streams, tools and
# structured output (client_sessions.py).
#
#   experiments/serving_clients.sh                       all four
#   experiments/serving_clients.sh guidellm node         those named
#
# Run it where paceline[serve] is installed. Needs a package index, and node and npm (Debian: apt install nodejs npm) for node.
# Environment: CLIENTS_VENV (where the clients are installed and kept), PYTHON (the one with paceline, default python3), URL (a
# server that runs already), STREAMS (default 1,2,4,8,16), FUZZ_SECONDS (default 180), SERVE (more options of paceline serve).
set -eu
cd "$(dirname "$0")/.."

clients=${*:-guidellm schemathesis node sessions}
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
install_node() { npm install --silent --no-audit --no-fund --prefix "$venv/node" openai@6.49.0; }

stop() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" || true
    fi
    rm -rf "$work"
}

# Short answers: a request that schemathesis makes up sets no limit of its own, and beside other work on the machine four that
# fill the context take longer than a client waits. Sessions with tools need more room.
start() {
    length=256
    case " $clients " in *" sessions "*) length=1024 ;; esac
    # shellcheck disable=SC2086
    "$python" -m paceline serve --port 0 --max-len "$length" --default-max-tokens 16 ${SERVE:-} >"$work/server.log" 2>&1 &
    server=$!
    until grep -q '^ready: ' "$work/server.log"; do
        if ! kill -0 "$server" 2>/dev/null; then
            cat "$work/server.log" >&2
            exit 1
        fi
        sleep 0.2
    done
    url=$(sed -n 's/^listening on \(http[^,]*\),.*/\1/p' "$work/server.log")
}

run_guidellm() {
    "$python" experiments/serving_clients.py prompts "$work/prompts.jsonl" &&
        "$venv/guidellm/bin/guidellm" run --disable-console --seed kind=static,value=1 \
            --backend "kind=openai_http,target=$url,model=$("$python" experiments/serving_clients.py model "$url"),max_tokens=24" \
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
    NODE_PATH="$venv/node/node_modules" node experiments/serving_clients.cjs "$url" "$("$python" experiments/serving_clients.py model "$url")"
}

run_sessions() {
    LITELLM_LOCAL_MODEL_COST_MAP=True "$venv/sessions/bin/python" experiments/client_sessions.py "$url" "$("$python" experiments/serving_clients.py model "$url")"
}

for client in $clients; do
    case $client in
        guidellm | schemathesis | node | sessions) ;;
        *) echo "error: there is no client $client: choose from guidellm, schemathesis, node, sessions" >&2 && exit 2 ;;
    esac
done
mkdir -p "$venv"
for client in $clients; do once "$client"; done
trap stop EXIT
trap 'exit 130' INT TERM
url=${URL:-}
if [ -z "$url" ]; then start; fi
export HF_HUB_OFFLINE=1 HF_DATASETS_CACHE="$work/datasets"
for client in $clients; do
    echo "== $client against $url"
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
