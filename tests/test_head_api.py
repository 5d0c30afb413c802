"""Models and heads from files, through `load` and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import outpace
import tiny
import tiny_folder
from heads_files import D2T, HEADS, LAYOUTS, TARGET_ARRAYS, _native, native_mtp, random_head, specforge_eagle3
from outpace.cli.app import build
from outpace.config_gguf import to_gguf
from outpace.heads.config import HeadConfig
from outpace.models.gguf_names import BLOCK, TOP
from outpace.models.loading import load_model
from outpace.opening import check_vocabulary
from outpace.types import ModelError, UsageError
from outpace.weights.gguf import write_gguf
from outpace.weights.safetensors import read_safetensors, write_safetensors
from outpace.weights.tensor import Tensor

_LAYERS = replace(tiny_folder.CONFIG, num_hidden_layers=1)
_COMMON: dict[str, Any] = {"target_layers": 3, "target_hidden_size": 64, "draft_vocab_size": _LAYERS.vocab_size}
MTP = HeadConfig(algorithm="mtp", layers=_LAYERS, taps=(3,), norm_output=True, **_COMMON)
EAGLE3 = HeadConfig(
    algorithm="eagle3", layers=replace(_LAYERS, architecture="llama", qk_norm=False), taps=(0, 2), own_lm_head=True,
    **_COMMON,
)  # fmt: skip
PROMPT = "the cat sat on the mat, the cat sat on the"
DFLASH = HeadConfig(algorithm="dflash", layers=_LAYERS, taps=(0, 2), block_size=4, mask_token=5, **_COMMON)


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tiny_folder.write(tmp_path / "model")


@pytest.fixture
def inside(folder: Path) -> Path:
    """The model with a head inside."""
    tensors = {name: tensor.f32() for name, tensor in read_safetensors(folder).items()}
    write_safetensors(folder / "model.safetensors", tensors | _native(random_head(MTP)))
    return folder


def written(folder: Path, write: Callable[..., Path], config: HeadConfig) -> Path:
    folder.mkdir()
    write(folder, config, random_head(config))
    data = json.loads((folder / "config.json").read_text())
    data |= {"num_target_layers": 3} if "num_target_layers" in data else {}
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def answer(folder: Path, **more: Any) -> tuple[list[int], dict[str, list[int]], tuple[str, ...]]:
    with outpace.load(folder, precision="f32", **more) as model:
        result = model.generate(PROMPT, max_tokens=40, temperature=4.0, seed=1)
        return result.token_ids, result.stats.by_source, tuple(drafter.name for drafter in model.drafters)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_head_inside_the_model_drafts(inside: Path, backend: Any) -> None:
    plain, _, names = answer(inside, draft="none", backend=backend)
    assert names == ()
    tokens, sources, names = answer(inside, backend=backend)
    assert (tokens, names) == (plain, ("mtp", "suffix"))
    tokens, sources, names = answer(inside, draft="mtp", draft_tokens=3, backend=backend)
    assert (tokens, names) == (plain, ("mtp",))
    assert sources["mtp"][0] > 20


def test_heads_from_files_draft(folder: Path, tmp_path: Path) -> None:
    plain, _, _ = answer(folder, draft="none")
    heads = {
        "eagle3": written(tmp_path / "e", specforge_eagle3, EAGLE3),
        "eagle3 ": written(tmp_path / "s", specforge_eagle3, replace(EAGLE3, draft_vocab_size=len(D2T))),
        "eagle3  ": written(
            tmp_path / "t", specforge_eagle3, replace(EAGLE3, draft_vocab_size=len(D2T), own_lm_head=False)
        ),
        "dflash": written(tmp_path / "d", LAYOUTS["z-lab DFlash"][1], DFLASH),
    }
    write_safetensors(tmp_path / "mtp.safetensors", _native(random_head(MTP)))
    heads["mtp"] = tmp_path / "mtp.safetensors"
    for kind, path in ((name.strip(), path) for name, path in heads.items()):
        assert answer(folder, head=path)[::2] == (plain, (kind, "suffix"))
        tokens, sources, names = answer(folder, draft=kind, head=path, draft_tokens=3)
        assert (tokens, names) == (plain, (kind,))
        assert sources[kind][0] > 20


def other_tokens(folder: Path) -> str:
    """A tokenizer.json with two tokens the other way round."""
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    a, b = (next(token for token, i in vocabulary.items() if i == which) for which in (40, 41))
    vocabulary[a], vocabulary[b] = 41, 40
    data["model"]["merges"] = []
    return json.dumps(data)


def test_a_head_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    head = written(tmp_path / "e", specforge_eagle3, EAGLE3)
    alone = tmp_path / "alone"
    alone.mkdir()
    write_safetensors(alone / "mtp.safetensors", _native(random_head(MTP)))
    own, args = (folder / "tokenizer.json").read_text(), ["--model", str(folder)]
    for path, its in ((head, head), (alone / "mtp.safetensors", alone)):
        for text, message in (
            (own, None),
            (json.dumps(json.loads(own), indent=3), None),  # other bytes, the same tokens
            (other_tokens(folder), r"the head is for another target: token 40 is .* in one vocabulary and "),
            ("{}", "tokenizer.json"),
        ):
            (its / "tokenizer.json").write_text(text)
            shown = CliRunner().invoke(build(), ["inspect", str(path), *args])
            if message is None:
                outpace.load(folder, head=path).close()
                assert shown.exit_code == 0, shown.output
                continue
            with pytest.raises(ModelError, match=message) as caught:
                outpace.load(folder, head=path)
            assert str(its) in str(caught.value)
            assert shown.exit_code == 1
            assert shown.stderr.count("\n") == 1
            assert "tokenizer" in shown.stderr or "another target" in shown.stderr


def test_a_head_in_a_gguf_file_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    tokens = ["t", "0", *(f"t{i}" for i in range(65))]
    for name, texts in (("model", tokens), ("same", tokens), ("other", [*tokens[:-2], "t64", "t63"])):
        metadata = vocabulary | {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.merges": ["t 0"]}
        metadata["tokenizer.ggml.token_type"] = np.ones(67, np.int32)
        write_gguf(tmp_path / f"{name}.gguf", metadata, {})
    check_vocabulary(tmp_path / "same.gguf", tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"other\.gguf: the head is for another target: token 65 is 't63' in one"):
        check_vocabulary(tmp_path / "other.gguf", tmp_path / "model.gguf")
    metadata["tokenizer.ggml.model"] = "llama"
    write_gguf(tmp_path / "unknown.gguf", metadata, {})
    with pytest.raises(ModelError, match=r"unknown\.gguf: tokenizer\.ggml\.model is 'llama'"):
        check_vocabulary(tmp_path / "unknown.gguf", tmp_path / "model.gguf")
    write_gguf(tmp_path / "none.gguf", {"general.architecture": "eagle3"}, {})
    check_vocabulary(tmp_path / "none.gguf", tmp_path / "model.gguf")


def test_what_does_not_fit_says_so(folder: Path, tmp_path: Path) -> None:
    head = tmp_path / "mtp.safetensors"
    write_safetensors(head, _native(random_head(MTP)))
    other = replace(MTP, layers=replace(_LAYERS, hidden_size=96), target_hidden_size=96)
    write_safetensors(tmp_path / "other.safetensors", _native(random_head(other)))
    for more, message in (
        ({"draft": "mtp"}, "needs head=PATH, .* which has none"),
        ({"draft": "eagle3"}, "needs head=PATH"),
        ({"draft": "dflash"}, "needs head=PATH"),
        ({"draft": "suffix", "head": head}, "head= and draft='suffix' exclude each other"),
        ({"draft": "eagle3", "head": head}, "is a head of kind mtp, not eagle3"),
        ({"head": tmp_path / "none"}, "no model at"),
        ({"head": folder}, "no draft head|not a draft head|head"),
        ({"head": tmp_path / "other.safetensors"}, "other.safetensors: "),
    ):
        with pytest.raises((UsageError, ModelError, outpace.HubError), match=message) as caught:
            outpace.load(folder, **more)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_a_damaged_head_inside_is_left_out_with_a_warning_unless_it_was_asked_for(inside: Path) -> None:
    tensors = {name: tensor.f32() for name, tensor in read_safetensors(inside).items()}
    del tensors["mtp.fc.weight"]
    write_safetensors(inside / "model.safetensors", tensors)
    with pytest.warns(UserWarning, match=r"head inside the model is not used: .*fc\.weight"):
        assert answer(inside)[2] == ("suffix",)
    with pytest.raises(ModelError, match=r"fc\.weight"):
        outpace.load(inside, draft="mtp")


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_to_draft_nothing_nothing_is_opened(inside: Path, tmp_path: Path, backend: Any) -> None:
    """Not even looked for: none of these is there."""
    gone = tmp_path / "gone"
    for more in (
        {},
        {"draft": "mtp"},
        {"draft": "eagle3", "head": gone},
        {"draft_model": gone},
        {"draft": "datastore", "datastore": gone},
        {"draft": "self", "draft_layers": 1},
        {"draft": "none"},
    ):
        with outpace.load(inside, draft_tokens=0, backend=backend, **more) as model:  # type: ignore[arg-type]
            assert model.drafters == ()
            assert len(model.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_no_choice_is_ignored_in_silence(folder: Path) -> None:
    more: dict[str, Any]
    for more, message in (
        ({"draft": "none", "draft_tokens": 5}, "draft_tokens=5 needs a drafter"),
        ({"draft_tokens": True}, r"draft_tokens must be in 0 \.\. 15, got True"),
        ({"draft_tokens": False}, r"draft_tokens must be in 0 \.\. 15, got False"),
        ({"draft_tokens": 2.0}, r"draft_tokens must be in 0 \.\. 15, got 2\.0"),
        ({"backend": "reference", "threads": 3}, "threads= and backend='reference' exclude each other"),
    ):
        with pytest.raises(UsageError, match=message):
            outpace.load(folder, **more)


def test_a_model_loads_without_the_head_inside(tmp_path: Path) -> None:
    loaded = load_model(native_mtp(tmp_path, HEADS["mtp"], random_head(HEADS["mtp"])))
    assert (loaded.head, loaded.config.num_hidden_layers) == (True, 8)
    assert set(loaded.weights.keys()) == set(TARGET_ARRAYS)
    # As GGUF, where it is one more layer.
    config, arrays = tiny.random_model("qwen3")
    back = {canonical: name for name, canonical in BLOCK.items()}
    tensors = {name: Tensor.from_array(arrays[canonical]) for name, canonical in TOP.items()}
    for name, array in arrays.items():
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            tensors[f"blk.{layer}.{back[part.removesuffix('.weight')]}.weight"] = Tensor.from_array(array)
    tensors["blk.3.nextn.eh_proj.weight"] = tensors["token_embd.weight"]
    path = tmp_path / "model.gguf"
    write_gguf(path, to_gguf(config) | {"qwen3.block_count": 4, "qwen3.nextn_predict_layers": 1}, tensors)
    loaded = load_model(path)
    assert (loaded.head, loaded.config.num_hidden_layers) == (True, 3)
    assert set(loaded.weights.keys()) == set(arrays)


def test_the_command_line_takes_a_head(folder: Path, tmp_path: Path) -> None:
    head = tmp_path / "mtp.safetensors"
    write_safetensors(head, _native(random_head(MTP)))
    args = ["generate", "--model", str(folder), PROMPT, "--raw", "--max-tokens", "20", "--seed", "1", "--json"]
    plain = CliRunner().invoke(build(), [*args, "--no-speculation"])
    drafted = CliRunner().invoke(build(), [*args, "--head", str(head), "--draft-tokens", "3"])
    assert (plain.exit_code, drafted.exit_code) == (0, 0), drafted.output
    a, b = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert a["text"] == b["text"]
    assert b["stats"]["drafted"] > 0
