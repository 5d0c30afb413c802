#!/bin/sh
# Builds the check of the native core (csrc/check/; no Python in it) and runs it:
#   scripts/check_kernels.sh        every kernel family that this processor runs, against the portable one; where
#                                   qemu-x86_64 is there, also as a processor without AVX and as one with AVX2 alone
#   scripts/check_kernels.sh neon   the same, then built for 64-bit ARM and run under qemu-aarch64, as a processor with
#                                   the dot product and as one without; both must print the digests of this processor
# qemu runs ARM's instructions exactly, but with the memory order of the machine it runs on: what a weaker order would
# do to the thread pool shows on real ARM only.
set -eu
cd "$(dirname "$0")/.."
out=build/check
mkdir -p "$out"

need() {  # command, package
    command -v "$1" >/dev/null || { echo "$0 needs $1: apt-get install $2 (Debian, Ubuntu)" >&2; exit 1; }
}

emulator() {  # architecture: its qemu, or nothing
    command -v "qemu-$1-static" || command -v "qemu-$1" || true
}

build() {  # folder, CMake's options
    folder=$out/$1
    shift
    cmake -S . -B "$folder" -DOUTPACE_CHECK=ON "$@" >"$out/log" 2>&1 && cmake --build "$folder" --parallel 2 >"$out/log" 2>&1 ||
        { cat "$out/log" >&2; exit 1; }
    # A function that the linker may share between files would be taken from one of them: compiled for AVX, it would end
    # a processor without it. (Linux's nm: W, V and u.)
    for file in $(find "$folder" -name 'kernels_*.cpp.o'); do
        shared=$("${NM:-nm}" -C "$file" | grep -E ' [WVu] ' || true)
        [ -z "$shared" ] || { echo "$file leaves functions to the linker: $shared" >&2; exit 1; }
    done
}

run() {  # what it is, the families it must have, the command
    echo "== $1"
    name=$2
    shift 2
    rm -f "$out/failed"
    { "$@" 2>&1 || touch "$out/failed"; } | grep -v '^qemu.*warning' | tee "$out/printed"
    [ ! -e "$out/failed" ] || exit 1
    grep -qx "families:$name" "$out/printed" || [ "$name" = any ] || { echo "expected the families$name" >&2; exit 1; }
    grep '^digest' "$out/printed" >"$out/digests.new"
    [ -e "$out/digests" ] || cp "$out/digests.new" "$out/digests"
    [ -s "$out/digests.new" ] && [ "$(grep -cFxf "$out/digests" "$out/digests.new")" = "$(wc -l <"$out/digests.new")" ] ||
        { echo "no end, or other bits than the first run's" >&2; exit 1; }
}

need cmake cmake
need c++ g++
if [ "${1:-}" = neon ]; then
    need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
    arm=$(emulator aarch64)
    [ -n "$arm" ] || need qemu-aarch64-static qemu-user-static
fi
rm -f "$out/digests"

build native
run "this processor" any "$out/native/outpace_check"
if [ "${1:-}" = neon ]; then
    build aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
        -DCMAKE_EXE_LINKER_FLAGS=-static
    run "ARM with the dot product (qemu)" " neon portable" "$arm" -cpu neoverse-n1 "$out/aarch64/outpace_check" 100
    run "ARM without it (qemu)" " portable" "$arm" -cpu cortex-a53 "$out/aarch64/outpace_check" 50
fi
x86=$(emulator x86_64)
if [ "$(uname -m)" = x86_64 ] && [ -n "$x86" ]; then
    run "x86 without AVX (qemu)" " portable" "$x86" -cpu Nehalem "$out/native/outpace_check" 20 1
    run "x86 with AVX2 (qemu)" " avx2 portable" "$x86" -cpu Haswell "$out/native/outpace_check" 20 1
fi
echo "the same bits everywhere"
