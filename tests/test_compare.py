"""scripts/compare_llama_cpp.py: its perplexity is the definition's, and it reads what llama.cpp's tools write."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from outpace.backends.base import Rows
from outpace.backends.native import NativeBackend
from outpace.bench import shapes
from outpace.config import ModelConfig

SCRIPT = Path(__file__).parent.parent / "scripts" / "compare_llama_cpp.py"
TINY = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=1024,
)


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_llama_cpp", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "TOOLS", tmp_path)
    monkeypatch.setattr(script, "PIECE", 8)
    return script


@pytest.fixture(name="target", scope="module")
def _target() -> NativeBackend:
    return NativeBackend(TINY, shapes.random_weights(TINY, 8), slots=1, threads=1)


def tool(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("begin", [None, 7])
def test_perplexity_scores_the_second_half_of_each_piece(
    script: ModuleType, target: NativeBackend, begin: int | None
) -> None:
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 64, 8 * 3 + 5)]  # the last 5 fill no piece
    losses = []
    for at in (0, 8, 16):
        piece = ids[at : at + 8]
        slot = target.new_slot()
        logits = target.forward([Rows(slot, piece if begin is None else [begin, *piece[1:]])]).logits.astype(float)
        target.free_slot(slot)
        # Tokens 5, 6 and 7 of each piece, from the rows before them.
        losses += [math.log(np.exp(logits[i]).sum()) - logits[i][piece[i + 1]] for i in (4, 5, 6)]
    assert script.our_perplexity(target, ids, begin) == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)


def test_speeds_and_perplexity_are_read_from_the_tools(
    script: ModuleType, target: NativeBackend, tmp_path: Path
) -> None:
    entries = "".join(f'{{"n_prompt": {n}, "n_gen": 0, "samples_ts": [{n}.5, 1]}},' for n in (8, 64, 512))
    tool(tmp_path, "llama-bench", f"""echo '[{entries} {{"n_prompt": 0, "n_gen": 4, "samples_ts": [2, 4]}}]'""")
    tool(tmp_path, "llama-perplexity", "echo 'Final estimate: PPL = 13.2500 +/- 0.3' >&2")
    found = script.compare(tmp_path / "m.gguf", target, blocks=1, prompts=script.PROMPTS, generated=4, repeats=2)
    assert found["samples"]["llama_cpp"] == {
        "prompt 8": [8.5, 1, 8.5, 1],
        "prompt 64": [64.5, 1, 64.5, 1],
        "prompt 512": [512.5, 1, 512.5, 1],
        "decode": [2, 4, 2, 4],
    }
    assert {name: len(values) for name, values in found["samples"]["outpace"].items()} == dict.fromkeys(
        found["samples"]["llama_cpp"], 4
    )
    assert found["decode"]["llama_cpp"] == 3
    assert found["rows 8"]["llama_cpp"] == pytest.approx(8 * 3 / 4.75)
    assert found["decode"]["ratio"] == found["decode"]["outpace"] / 3
    assert script.their_perplexity(tmp_path / "m.gguf", tmp_path / "t.txt", 2) == 13.25
    tool(tmp_path, "llama-bench", """echo '[{"n_prompt": 0, "n_gen": 4, "samples_ts": [2, 4]}]'""")
    alone = script.compare(tmp_path / "m.gguf", target, blocks=1, prompts=(), generated=4, repeats=2)
    assert set(alone) == {"decode", "best", "samples"}


def test_a_missing_or_failing_tool_is_one_line(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"llama-bench is missing: run scripts/build_llama_cpp\.sh"):
        script.theirs(tmp_path / "m.gguf", 2, (8,), 4, 1)
    tool(tmp_path, "llama-bench", "echo details >&2; echo 'no such model' >&2; exit 1")
    with pytest.raises(SystemExit, match="llama-bench failed: no such model"):
        script.theirs(tmp_path / "m.gguf", 2, (8,), 4, 1)
    tool(tmp_path, "llama-perplexity", "echo nothing")
    with pytest.raises(SystemExit, match="no estimate"):
        script.their_perplexity(tmp_path / "m.gguf", tmp_path / "t.txt", 2)
