# Read by decode_vs_peers.sh and serving_vs_peers.sh, from the repository's root: builds the peers once, into $venv.

venv=${PEERS_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/paceline-peers/decode}
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
    $pip install --no-deps -r experiments/decode_vs_peers_requirements.txt
    cp requirements.lock "$venv/requirements.lock"
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

llama_server() { $pip install --no-deps -r experiments/serving_vs_peers_requirements.txt; }

vllm() {
    python3 -m venv "$venv/vllm"
    "$venv/vllm/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps \
        -r experiments/decode_vs_peers_vllm_requirements.txt
}

# install_peers NAME...: any of llama.cpp, llama-server, vllm. Ours come first, anew when the lock file has changed.
install_peers() {
    if ! cmp -s requirements.lock "$venv/requirements.lock"; then rm -f "$venv/paceline.ready"; fi
    once paceline ours
    for peer in "$@"; do
        case $peer in
            llama.cpp) once llama.cpp llama_cpp ;;
            llama-server) once llama-server llama_server ;;
            vllm) once vllm vllm ;;
            *) echo "error: there is no peer $peer: choose from llama.cpp, llama-server, vllm" >&2 && exit 2 ;;
        esac
    done
    native_library
}

# The native library of this checkout, made again when a source is newer than it.
native_library() {
    if [ -n "${PACELINE_NATIVE_LIBRARY:-}" ]; then return; fi
    library=$(ls paceline/model/native/libpaceline_native.* 2>/dev/null || true)
    if [ -z "$library" ] || [ -n "$(find paceline/model/native -name '*.[chi]*' -newer "$library")" ]; then
        "$venv/bin/python" paceline/model/native/build.py
    fi
}
