#!/usr/bin/env bash
# Makes F16, Q8_0 and Q4_0 files of the default model from its Q4_1 file, in build/peers/models, for comparing speeds on
# those formats. Their weights are the Q4_1 file's, rounded once more: good for timing and for comparing two programs on
# one file, not for judging a format's quality. The files' names and descriptions say so.
# Usage: scripts/requantise_smollm2.sh [Q4_1.gguf]. Needs scripts/build_llama_cpp.sh to have run.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "requantise_smollm2: $1" >&2
    exit 1
}

quantize=build/peers/llama.cpp/bin/llama-quantize
[ -x "$quantize" ] || fail "llama-quantize is missing: run scripts/build_llama_cpp.sh first"
PYTHON=${PYTHON:-python3}
source=${1:-$("$PYTHON" -c 'from outpace import hub; print(hub.resolve("smollm2-135m"))')}
[ -f "$source" ] || fail "no such file: $source"

mkdir -p build/peers/models
for kind in F16 Q8_0 Q4_0; do
    to=build/peers/models/SmolLM2-135M-Instruct.requantised-$kind.gguf
    if [ ! -f "$to" ]; then
        # A broken run must not leave a file that looks complete.
        "$quantize" --allow-requantize \
            --override-kv "general.description=str:re-quantised to $kind from the Q4_1 file" \
            "$source" "$to.part" "$kind" 2 >build/peers/models/quantize-$kind.log 2>&1 ||
            fail "llama-quantize failed, see build/peers/models/quantize-$kind.log"
        mv "$to.part" "$to"
    fi
    echo "$to"
done
