# Read by decode_vs_peers.sh and vllm_serves_export.sh, from the repository's root: builds the peers once, into $venv.

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

# The sources of llama.cpp come in the sdist of llama-cpp-python.
llama_sources() {
    rm -rf "$venv/src" && mkdir "$venv/src"
    $pip download --no-deps --no-build-isolation --no-binary llama-cpp-python -d "$venv/src" "llama-cpp-python==$release"
    tar -xzf "$venv/src/llama_cpp_python-$release.tar.gz" -C "$venv/src"
}

# What this processor has, as its kernel says: what -march=native finds has died of instructions that a virtual machine lacks.
# Without AMX: its kernels of this release end with an illegal instruction (tilezero) on a virtual machine that has AMX.
llama_flags() {
    for pair in AVX2:avx2 FMA:fma F16C:f16c BMI2:bmi2 AVX_VNNI:avx_vnni AVX512:avx512f AVX512_VBMI:avx512vbmi \
        AVX512_VNNI:avx512_vnni AVX512_BF16:avx512_bf16; do
        if grep -qw "${pair#*:}" /proc/cpuinfo; then echo "-DGGML_${pair%:*}=ON"; else echo "-DGGML_${pair%:*}=OFF"; fi
    done
}

# llama.cpp with its own server and benchmark.
llama_cpp() {
    if [ "$(uname -m)" = x86_64 ]; then flags="-DGGML_NATIVE=OFF $(llama_flags)"; else flags=-DGGML_NATIVE=ON; fi
    # shellcheck disable=SC2086
    "$venv/bin/cmake" -S "$venv/src/llama_cpp_python-$release/vendor/llama.cpp" -B "$venv/llama.cpp" -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DCMAKE_MAKE_PROGRAM="$venv/bin/ninja" ${LLAMA_FLAGS:-$flags} \
        -DLLAMA_BUILD_COMMIT="$commit" -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF >&2
    "$venv/bin/cmake" --build "$venv/llama.cpp" --parallel "${JOBS:-2}" --target llama-server llama-bench >&2
}

vllm() {
    python3 -m venv "$venv/vllm"
    "$venv/vllm/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps \
        -r experiments/decode_vs_peers_vllm_requirements.txt
}

# SGLang's package, beside vLLM's environment: what its parser reads, without its kernels.
sglang() {
    "$venv/vllm/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps -r experiments/sglang_requirements.txt
}

# install_peers NAME...: any of llama.cpp, vllm, sglang. Ours come first, anew when the lock file has changed.
install_peers() {
    if ! cmp -s requirements.lock "$venv/requirements.lock"; then rm -f "$venv/paceline.ready"; fi
    once paceline ours
    for peer in "$@"; do
        case $peer in
            llama.cpp)
                once llama.cpp-src llama_sources
                once llama.cpp llama_cpp
                ;;
            vllm) once vllm vllm ;;
            sglang)
                once vllm vllm
                once sglang sglang
                ;;
            none) ;;
            *) echo "error: there is no peer $peer: choose from llama.cpp, vllm, sglang, none" >&2 && exit 2 ;;
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
