#!/bin/sh
# Decoding speed on CPU beside llama.cpp, Transformers and vLLM, one stream and eight; prints tables of ratios and writes
# bench/results/decode_vs_peers_cpu_<date>.json. Run it on an idle machine.
#
#   bench/decode_vs_peers.sh --prompts gsm8k_test.jsonl --limit 8 [more options of bench/decode_vs_peers.py]
#
# Needs a C++ compiler and a package index; building llama.cpp takes some ten minutes of one core. Environment: PEERS_VENV (where
# the peers are installed and kept), JOBS (compilers at once, default 2), PEERS (those to install: "llama.cpp vllm"; Transformers
# is among our own requirements), THREADS (default 2).
set -eu
cd "$(dirname "$0")/.."

venv=${PEERS_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/paceline-peers/decode}
peers=${PEERS:-llama.cpp vllm}
release=0.3.36 commit=0c1e57098
pip="$venv/bin/python -m pip --quiet --disable-pip-version-check"

# once MARK COMMAND: run it unless it has been done in this environment. No ||, &&, if around it: they would switch off -e in it.
once() {
    if [ -e "$venv/$1.ready" ]; then return; fi
    echo "$2, into $venv" >&2
    "$2"
    touch "$venv/$1.ready"
}

ours() {
    python3 -m venv "$venv"
    $pip install --no-deps -r requirements.lock
    $pip install --no-deps -r bench/decode_vs_peers_requirements.txt
}

# The sources in the sdist are built once, for this processor, with llama.cpp's own benchmarks; the bindings load that library.
llama_cpp() {
    rm -rf "$venv/src" && mkdir "$venv/src"
    $pip download --no-deps --no-build-isolation --no-binary llama-cpp-python -d "$venv/src" "llama-cpp-python==$release"
    tar -xzf "$venv/src/llama_cpp_python-$release.tar.gz" -C "$venv/src"
    bindings=$venv/src/llama_cpp_python-$release
    "$venv/bin/cmake" -S "$bindings/vendor/llama.cpp" -B "$venv/llama.cpp" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_MAKE_PROGRAM="$venv/bin/ninja" -DGGML_NATIVE=ON -DLLAMA_BUILD_COMMIT="$commit" -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF >&2
    "$venv/bin/cmake" --build "$venv/llama.cpp" --parallel "${JOBS:-2}" --target llama llama-bench llama-batched-bench >&2
    CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $pip install --no-deps --no-build-isolation "$bindings"
}

vllm() {
    python3 -m venv "$venv/vllm"
    "$venv/vllm/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps \
        -r bench/decode_vs_peers_vllm_requirements.txt
}

once paceline ours
for peer in $peers; do
    case $peer in
        llama.cpp) once llama.cpp llama_cpp ;;
        vllm) once vllm vllm ;;
    esac
done

# The native library of this checkout, made again when a source is newer than it.
library=$(ls paceline/model/native/libpaceline_native.* 2>/dev/null || true)
if [ -z "${PACELINE_NATIVE_LIBRARY:-}" ]; then
    if [ -z "$library" ] || [ -n "$(find paceline/model/native -name '*.[chi]*' -newer "$library")" ]; then
        "$venv/bin/python" paceline/model/native/build.py
    fi
fi

export LLAMA_CPP_LIB_PATH="$venv/llama.cpp/bin" PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$venv/bin/python" bench/decode_vs_peers.py --threads "${THREADS:-2}" "$@"
