#!/usr/bin/env bash
# Takes every figure of docs/speed.md on this machine and writes them to docs/figures/*.json; about 50 minutes. Then
# scripts/speed_table.py puts them into the page.
#
#   scripts/build_llama_cpp.sh && scripts/requantise_smollm2.sh && scripts/measure.sh [PART ...]
#
# Parts: smollm2, shapes, contexts, start, self, heads, speculation, sweep, llama_cpp, busy, perplexity, torch; all of them unless
# some are named. HEAD=PATH: a draft head for speculation; without one the text alone drafts.
# Needs the `outpace` command (or PYTHONPATH=src) and, for torch, the test tools. Nothing else should run meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
FIGURES=docs/figures
parts=" ${*:-smollm2 shapes contexts start self heads speculation sweep llama_cpp busy perplexity torch} "
mkdir -p $FIGURES

wanted() { [[ $parts == *" $1 "* ]]; }

kernels() { # NAME OPTIONS...: outpace bench kernels, its JSON into NAME.json
    local name=$1
    shift
    echo "== $name" >&2
    $PYTHON -m outpace bench kernels "$@" --json >"$FIGURES/$name.json.part"
    mv "$FIGURES/$name.json.part" "$FIGURES/$name.json"
}

files=(build/peers/models/*Q8_0.gguf build/peers/models/*Q4_0.gguf "$($PYTHON -c 'from outpace import hub; print(hub.resolve("smollm2-135m"))')")

wanted smollm2 && {
    kernels smollm2-4bit --seconds 15
    kernels smollm2-8bit --shape smollm2-135m --bits 8 --seconds 15
}
wanted shapes && for shape in qwen3-0.6b qwen3-1.7b qwen3-4b; do
    for bits in 8 4; do kernels $shape-${bits}bit --shape $shape --bits $bits --context 0 --seconds 10; done
done
wanted contexts && for cache in f32 f16 q8; do
    kernels contexts-smollm2-$cache --shape smollm2-135m --bits 4 --kv-cache $cache --seconds 6 \
        --context 0 --context 1024 --context 4096 --context 16384 --context 32768
done
wanted start && {
    $PYTHON -m outpace bench start --runs 25 --json >$FIGURES/start.json.part
    mv $FIGURES/start.json.part $FIGURES/start.json
}
wanted self && $PYTHON scripts/measure_speculation.py --model build/peers/models/*F16.gguf --precision bf16 --self \
    --json $FIGURES/self_f16.json
head() { # NAME OPTIONS...: outpace bench head, its JSON into head-NAME.json
    local name=$1
    shift
    echo "== head $name" >&2
    $PYTHON -m outpace bench head "$@" --json >"$FIGURES/head-$name.json.part"
    mv "$FIGURES/head-$name.json.part" "$FIGURES/head-$name.json"
}
# Tokens a round as published, chain of 7: MT-Bench and GSM8K for Qwen3-4B with EAGLE-3 (docs/heads.md).
wanted heads && for bits in 8 4; do
    head smollm2-${bits}bit --shape smollm2-135m --bits $bits --draft-vocab 12288 --seconds 6 --tau 2.39 --tau 5.14
    for shape in qwen3-0.6b qwen3-1.7b qwen3-4b; do
        head $shape-${bits}bit --shape $shape --bits $bits --seconds 8 --tau 2.39 --tau 5.14
    done
done
wanted speculation && $PYTHON scripts/compare_speculation.py "${files[@]}" ${HEAD:+--head "$HEAD"} \
    --json $FIGURES/speculation.json
wanted sweep && $PYTHON scripts/measure_speculation.py ${HEAD:+--head "$HEAD"} --held-out 8 --turns 1 \
    --json $FIGURES/sweep.json
compare() { $PYTHON scripts/compare_llama_cpp.py "${files[@]}" "$@"; }
wanted llama_cpp && compare --json $FIGURES/llama_cpp.json
wanted busy && compare --blocks 4 --repeats 2 --tokens 16 --no-prompts --busy "$(nproc)" --json $FIGURES/llama_cpp_busy.json
wanted perplexity && compare --blocks 0 --perplexity --json $FIGURES/perplexity.json
wanted torch && $PYTHON scripts/compare_torch.py --json $FIGURES/torch.json
exit 0
