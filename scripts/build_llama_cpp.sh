#!/usr/bin/env bash
# Builds llama.cpp's command-line tools for comparisons, from the source archive of the llama-cpp-python package, with
# the instructions of this processor. They go to build/peers/llama.cpp/bin. Run again, it does only what is missing.
# JOBS sets how many compilers run at once (2), PYTHON the Python whose pip fetches the archive (75 MB).
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=0.3.36
TOOLS="llama-bench llama-quantize llama-perplexity llama-batched-bench llama-cli llama-server"
JOBS=${JOBS:-2}
PYTHON=${PYTHON:-python3}
root=$PWD/build/peers
bin=$root/llama.cpp/bin

fail() {
    echo "build_llama_cpp: $1" >&2
    exit 1
}

missing() { for tool in $TOOLS; do [ -x "$bin/$tool" ] || echo "$tool"; done; }

if [ -f "$root/version" ] && [ "$(cat "$root/version")" = "$VERSION" ] && [ -z "$(missing)" ]; then
    echo "llama.cpp of llama-cpp-python $VERSION is built: $bin"
    exit 0
fi
command -v cmake >/dev/null || fail "needs CMake: pip install cmake"
command -v "${CXX:-c++}" >/dev/null || fail "needs a C++ compiler: apt-get install g++"

mkdir -p "$root"
archive=$root/llama_cpp_python-$VERSION.tar.gz
if [ ! -f "$archive" ]; then
    # pip prepares the metadata of a source archive; with the tools at hand it need not fetch them first.
    isolation=
    "$PYTHON" -c 'import scikit_build_core' 2>/dev/null && isolation=--no-build-isolation
    echo "fetching llama-cpp-python $VERSION"
    "$PYTHON" -m pip --disable-pip-version-check -q download --no-binary :all: --no-deps $isolation \
        --dest "$root/part" "llama-cpp-python==$VERSION"
    mv "$root/part/"*.tar.gz "$archive"
    rm -rf "$root/part"
fi
source=$root/llama_cpp_python-$VERSION/vendor/llama.cpp
if [ ! -f "$root/version" ] || [ "$(cat "$root/version")" != "$VERSION" ]; then
    rm -rf "$root/llama.cpp" "$root/llama_cpp_python-$VERSION"
    tar -xzf "$archive" -C "$root" "llama_cpp_python-$VERSION/vendor/llama.cpp"
    echo "$VERSION" >"$root/version"
fi

# GCC 12's header tells the compiler that loading a tile configuration reads 8 of its 64 bytes, so the rest is optimised
# away and the first AMX instruction is an illegal one. The line added here says that all of it is read.
amx=$source/ggml/src/ggml-cpu/amx/mmq.cpp
grep -q 'outpace:' "$amx" || sed -i \
    's|^    _tile_loadconfig(&tc);|    asm volatile("" : : "r"(\&tc) : "memory");  // outpace: see build_llama_cpp.sh\n&|' "$amx"
grep -q 'outpace:' "$amx" || fail "the place to mend in $amx was not found"

generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
# GGML_NATIVE takes all that this processor has. OpenMP stays on: it is llama.cpp's default and the faster pool.
cmake -S "$source" -B "$root/llama.cpp" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DGGML_CCACHE=OFF \
    >"$root/configure.log" 2>&1 ||
    fail "CMake failed, see $root/configure.log"
for tool in $TOOLS; do
    [ -x "$bin/$tool" ] && continue
    nice cmake --build "$root/llama.cpp" --target "$tool" -j "$JOBS" >"$root/build-$tool.log" 2>&1 ||
        echo "build_llama_cpp: $tool was not built, see $root/build-$tool.log" >&2
done
[ -z "$(missing)" ] || fail "not built: $(missing | tr '\n' ' ')"
echo "built: $bin"
