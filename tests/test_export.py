"""Models written as quantised GGUF: the file is the loaded model bit for bit, and other readers see its numbers."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from typer.testing import CliRunner

import outpace
import text_data
import tiny
import tiny_folder
from outpace.backends.base import Rows
from outpace.backends.native import NativeBackend
from outpace.cli.app import build
from outpace.config import ModelConfig
from outpace.models.export import export_gguf, lost
from outpace.models.loading import LoadedModel, load_model
from outpace.models.names import expected_tensors, is_matrix
from outpace.text import tokenizer as our
from outpace.text.export import tokenizer_metadata
from outpace.types import CapacityError, ModelError, UsageError
from outpace.weights.formats import quantise_q4, quantise_q8
from outpace.weights.gguf import GGUFFile
from outpace.weights.safetensors import write_safetensors
from outpace.weights.tensor import Tensor
from test_models_loading import hf_json, llama_cpp_permute

VOCAB = 300  # the tokenizer has 259 tokens: the rest is padding
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {},
    "qwen2": {},
    "llama": {"rope_scaling": LLAMA3},
    "bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "moe": {},
    "moe_shared": {},
    "yarn": {"rope_scaling": YARN, "rms_norm_eps": 1e-5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


def bf16(array: np.ndarray) -> Tensor:
    bits = (np.ascontiguousarray(array).view(np.uint32) >> 16).astype("<u2")
    return Tensor(array.shape, "BF16", bits.reshape(-1).view(np.uint8))


def write_folder(folder: Path, variant: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face folder in bfloat16 with a tokenizer."""
    folder.mkdir(exist_ok=True)
    tiny_folder.write(folder)
    config, arrays = tiny.random_model(variant, seed, vocab_size=VOCAB, **changes)
    settings = hf_json(config, eos_token_id=258) | VARIANTS[variant]
    (folder / "config.json").write_text(json.dumps(settings))
    write_safetensors(folder / "model.safetensors", {name: bf16(array) for name, array in arrays.items()})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def logits(loaded: LoadedModel) -> np.ndarray:
    backend = NativeBackend(loaded.config, loaded.weights)
    tokens = [int(t) for t in np.random.default_rng(0).integers(VOCAB, size=20)]
    return backend.forward([Rows(backend.new_slot(), tokens)]).logits


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_q8_file_is_the_model_loaded_in_int8(tmp_path: Path, variant: str) -> None:
    source = write_folder(tmp_path / "model", variant)
    made = export_gguf(load_model(source), "q8", tmp_path / "m.gguf")
    assert made.bytes == (tmp_path / "m.gguf").stat().st_size
    assert made.notices == ()
    before, after = load_model(source), load_model(tmp_path / "m.gguf")
    layers = range(before.config.num_hidden_layers)
    assert [after.config.window(i) for i in layers] == [before.config.window(i) for i in layers]
    if variant == "llama":  # the divisors of its frequencies are rounded once more
        np.testing.assert_allclose(logits(after), logits(before), atol=2e-3)
    else:
        assert same_bits(logits(after), logits(before))
    before, after = load_model(source), load_model(tmp_path / "m.gguf")
    for name, shape in expected_tensors(before.config).items():
        old, new = before.weights.take_tensor(name), after.weights.take_tensor(name)
        if is_matrix(name, shape):
            assert new.kind == "Q8_0", name
            assert same_bits(new.f32(), quantise_q8(old.f32()).f32()), name
        else:
            assert new.kind == "F32", name
            assert same_bits(new.f32(), old.f32()), name


@pytest.mark.parametrize("variant", ["qwen3", "tied", "llama", "moe_shared"])
def test_the_q4_file_has_the_rule_s_values_and_8_bits_at_both_ends(tmp_path: Path, variant: str) -> None:
    source = write_folder(tmp_path / "model", variant)
    export_gguf(load_model(source), "q4", tmp_path / "m.gguf")
    before, after = load_model(source), load_model(tmp_path / "m.gguf")
    for name, shape in expected_tensors(before.config).items():
        old, new = before.weights.take_tensor(name), after.weights.take_tensor(name)
        rule, kind = (quantise_q8, "Q8_0") if name.startswith(("lm_head", "model.embed")) else (quantise_q4, "Q4_0")
        if is_matrix(name, shape):
            assert new.kind == kind, name
            assert same_bits(new.f32(), rule(old.f32()).f32()), name
        else:
            assert new.kind == "F32", name


@pytest.mark.parametrize("to", ["q8", "q4"])
def test_the_gguf_package_reads_the_same_floats_in_llama_cpp_s_order(tmp_path: Path, to: str) -> None:
    source = write_folder(tmp_path / "model", "llama")
    export_gguf(load_model(source), to, tmp_path / "m.gguf")  # type: ignore[arg-type]
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    ours = GGUFFile.open(tmp_path / "m.gguf").tensors
    assert [t.name for t in reader.tensors] == list(ours)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert same_bits(values.reshape(ours[tensor.name].shape), ours[tensor.name].f32()), tensor.name
    config, weights = load_model(source).config, load_model(source).weights
    rule = quantise_q8 if to == "q8" else quantise_q4
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        weight = weights.take_tensor(f"model.layers.1.self_attn.{part}_proj.weight").f32()
        expected = rule(llama_cpp_permute(weight, heads)).f32()
        assert same_bits(ours[f"blk.1.attn_{part}.weight"].f32(), expected)
    field = {name: reader.fields[name].contents() for name in reader.fields if not name.startswith("GGUF.")}
    assert field["general.architecture"] == "llama"
    assert field["llama.block_count"] == config.num_hidden_layers
    assert field["llama.rope.dimension_count"] == config.head_dim
    assert field["general.file_type"] == (gguf.LlamaFileType.MOSTLY_Q8_0 if to == "q8" else 2)
    assert field["tokenizer.ggml.tokens"][258:261] == ["<|im_end|>", "[PAD259]", "[PAD260]"]
    assert field["tokenizer.ggml.token_type"][255:260] == [1, 3, 3, 3, 5]
    assert field["tokenizer.ggml.eos_token_id"] == 258
    assert field["tokenizer.chat_template"] == tiny_folder.TEMPLATE


def test_rows_that_fill_no_blocks_stay_floats(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", intermediate_size=72)
    export_gguf(load_model(source), "q4", tmp_path / "m.gguf")
    kinds = {name: tensor.kind for name, tensor in GGUFFile.open(tmp_path / "m.gguf").tensors.items()}
    assert kinds["blk.0.ffn_down.weight"] == "F32"
    assert kinds["blk.0.ffn_up.weight"] == "Q4_0"
    export_gguf(load_model(source), "q8", tmp_path / "m.gguf", force=True)
    assert same_bits(logits(load_model(source)), logits(load_model(tmp_path / "m.gguf")))


def test_a_gguf_file_keeps_its_metadata_and_what_is_rounded_already(tmp_path: Path, folder: Path) -> None:
    first, second, third = (tmp_path / f"{i}.gguf" for i in range(3))
    export_gguf(load_model(folder), "q8", first)
    made = export_gguf(load_model(first), "q8", second)
    assert made.notices == ()
    assert second.read_bytes() == first.read_bytes()
    made = export_gguf(load_model(first), "q4", third)
    assert len(made.notices) == 1
    assert "re-quantised: Q8_0 x" in made.notices[0]
    before, after = GGUFFile.open(first), GGUFFile.open(third)
    changed = {"general.file_type", "outpace.requantised_from"}
    for key in before.metadata.keys() | after.metadata.keys():
        if key not in changed:
            assert np.array_equal(before.metadata[key], after.metadata[key]), key
    assert after.metadata["outpace.requantised_from"].startswith("Q8_0 x")
    for name, tensor in after.tensors.items():
        old = before.tensors[name]
        expected = quantise_q4(old.f32()).f32() if tensor.kind == "Q4_0" else old.f32()
        assert same_bits(tensor.f32(), expected)


def test_the_real_model_in_8_and_4_bits(tmp_path: Path, smollm2: Path) -> None:
    """Re-quantised from Q4_1: its answers stay sensible, and a text stays about as probable."""
    text = "The sky is blue because the air scatters blue light more than red light. Paris is the capital of France."
    surprise = {}
    for to in ("source", "q8", "q4"):
        path = smollm2 if to == "source" else tmp_path / f"{to}.gguf"
        if to != "source":
            made = export_gguf(load_model(smollm2), to, path)  # type: ignore[arg-type]
            assert made.notices[0].startswith("re-quantised: Q4_1 x210 ")
            assert made.kinds == ({"Q8_0": 211, "F32": 61} if to == "q8" else {"Q4_0": 210, "Q8_0": 1, "F32": 61})
        with outpace.load(path, precision="f32", draft="none", context=128) as model:
            assert model.tokenizer is not None
            ids = model.tokenizer.encode(text)
            slot = model.target.new_slot()
            rows = model.target.forward([Rows(slot, ids)]).logits.astype(np.float64)
            rows -= np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) + rows.max(1, keepdims=True)
            surprise[to] = -np.mean([rows[i, t] for i, t in enumerate(ids[1:])])
            model.target.free_slot(slot)
            answer = model.chat([{"role": "user", "content": "What is the capital of France?"}], max_tokens=12)
            assert "Paris" in answer.text, to
    assert abs(surprise["q8"] - surprise["source"]) < 0.06
    assert abs(surprise["q4"] - surprise["source"]) < 0.4


# ---------------------------------------------------------------------------------------------------------- streaming


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "big"
    folder.mkdir()
    tiny_folder.write(folder)
    sizes = {"vocab_size": 32768, "hidden_size": 512, "num_hidden_layers": 1, "tie_word_embeddings": True}
    config = tiny.random_config(**sizes)
    (folder / "config.json").write_text(json.dumps(hf_json(config)))
    values = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    write_safetensors(
        folder / "model.safetensors",
        {name: bf16(np.resize(values, shape)) for name, shape in expected_tensors(config).items()},
    )
    embedding = 2 * config.vocab_size * config.hidden_size
    tracemalloc.start()
    try:
        loaded = load_model(folder)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        export_gguf(loaded, "q8", tmp_path / "m.gguf")
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < embedding / 2  # the vocabulary and a few rows, never the whole of the largest tensor
    first = GGUFFile.open(tmp_path / "m.gguf").tensors["token_embd.weight"]
    assert same_bits(first.f32(), quantise_q8(bf16(np.resize(values, first.shape)).f32()).f32())


def test_progress_runs_to_the_end(tmp_path: Path, folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    export_gguf(load_model(folder), "q8", tmp_path / "m.gguf", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_targets_that_cannot_be(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m.gguf"
    export_gguf(load_model(folder), "q8", out)
    held = out.read_bytes()
    os.symlink(out, tmp_path / "link.gguf")
    os.link(out, tmp_path / "hard.gguf")
    (tmp_path / "dir.gguf").mkdir()
    for source, to, target, force, message in (
        (folder, "q8", out, False, "is there already; --force replaces it"),
        (folder, "q8", tmp_path / "dir.gguf", True, "is there and not a file"),
        (folder, "q8", tmp_path / "m.bin", True, "must be named .gguf"),
        (folder, "q8", tmp_path / "no" / "m.gguf", True, "no such folder"),
        (folder, "q5", out, True, "must be one of q8, q4"),
        (out, "q4", out, True, "is the model itself"),
        (out, "q4", tmp_path / "link.gguf", True, "is the model itself"),
        (out, "q4", tmp_path / "hard.gguf", True, "is the model itself"),
    ):
        with pytest.raises(UsageError, match=message):
            export_gguf(load_model(source), to, target, force=force)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
        with pytest.raises(CapacityError, match=r"not enough disk space in .*: 0 MB needed"):
            export_gguf(load_model(folder), "q4", out, force=True)
    assert out.read_bytes() == held
    export_gguf(load_model(folder), "q4", out, force=True)
    assert len(out.read_bytes()) < len(held)


def test_a_weight_that_cannot_be_rounded_is_named_and_nothing_is_left(tmp_path: Path, folder: Path) -> None:
    _, arrays = tiny.random_model("qwen3", vocab_size=VOCAB)
    arrays["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    write_safetensors(folder / "model.safetensors", arrays)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight: cannot quantise: a weight is NaN"):
        export_gguf(load_model(folder), "q8", tmp_path / "m.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("rope", "message"),
    [(YARN | {"mscale": 1.0}, "mscale"), (YARN | {"truncate": False}, "truncate")],
)
def test_what_gguf_has_no_key_for(tmp_path: Path, folder: Path, rope: dict[str, Any], message: str) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"rope_scaling": rope}))
    with pytest.raises(ModelError, match=f"model: GGUF cannot hold .*{message}"):
        export_gguf(load_model(folder), "q8", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


# ---------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "qwen35", "llama-bpe", "gpt-2"])
def test_a_folder_s_tokenizer_comes_back(tmp_path: Path, pre: str) -> None:
    meta = text_data.metadata(pre)
    first = our.Tokenizer.from_gguf(meta)
    first.save(tmp_path)
    made = tokenizer_metadata(tmp_path, first.vocab_size + 5)
    for key, value in meta.items():
        if key.endswith(("tokens", "token_type")):
            assert list(made[key])[:-5] == value
        else:
            assert made[key] == value, key
    again = our.Tokenizer.from_gguf(made)
    assert again.known_tokens == first.vocab_size
    assert again.fingerprint() == first.fingerprint()
    for text in text_data.TEXTS:
        for special in (False, True):
            assert again.encode(text, special=special) == first.encode(text, special=special)
    with pytest.raises(ModelError, match="the model only 100"):
        tokenizer_metadata(tmp_path, 100)


def test_tokenizers_that_gguf_cannot_say_are_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    file.write_text(tokenizer.to_str(), encoding="utf-8")
    with pytest.raises(ModelError, match="its pre-tokenizer is none of those"):
        tokenizer_metadata(folder, VOCAB)
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    file.write_text(tokenizer.to_str(), encoding="utf-8")
    with pytest.raises(ModelError, match=r"the token '<mask>' takes the spaces"):
        tokenizer_metadata(folder, VOCAB)


def test_special_tokens_and_templates(tmp_path: Path, folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"eos_token_id": [256, 258], "bos_token_id": 257}))
    named = json.loads((folder / "tokenizer_config.json").read_text())
    named["chat_template"] = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    export_gguf(load_model(folder), "q8", tmp_path / "m.gguf")
    loaded = load_model(tmp_path / "m.gguf")
    assert set(loaded.config.eos_token_ids) == set(load_model(folder).config.eos_token_ids) == {256, 258}
    assert loaded.metadata is not None
    assert loaded.metadata["tokenizer.ggml.eos_token_id"] == 258  # the tokenizer's own comes first
    assert loaded.metadata["tokenizer.ggml.bos_token_id"] == 257
    assert loaded.metadata["tokenizer.ggml.add_bos_token"] is False
    assert loaded.metadata["tokenizer.chat_template"] == "d"
    assert loaded.metadata["tokenizer.chat_template.tool_use"] == "t"
    assert loaded.metadata["tokenizer.chat_templates"] == ["tool_use"]
    (folder / "config.json").write_text(json.dumps(settings | {"eos_token_id": [1, 2, 3, 4]}))
    made = export_gguf(load_model(folder), "q8", tmp_path / "m.gguf", force=True)
    assert made.notices == ("GGUF names three end tokens at most: [3, 4] are left out",)


# ----------------------------------------------------------------------------------------------------- command line


def test_the_command_writes_a_file_that_answers_alike(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))

    def run(*args: object) -> Any:
        return CliRunner().invoke(build(), [str(a) for a in args])

    out = tmp_path / "m.gguf"
    made = run("quantize", folder, "--to", "q8", out)
    assert (made.exit_code, made.stdout) == (0, "")
    assert made.stderr.startswith(f"wrote {out} (")
    assert "%" not in made.stderr  # no terminal, no bar
    answers = []
    for model in (folder, out):
        found = run("generate", "a b c", "--model", model, "--json", "--temperature", "0", "--max-tokens", "30")
        assert found.exit_code == 0, found.output
        answers.append(json.loads(found.stdout)["token_ids"])
    assert answers[0] == answers[1]
    refused = run("quantize", folder, out, "--to", "q8")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"outpace: {out} is there already; --force replaces it\n"
    assert run("quantize", folder, out, "--to", "q4", "--force", "--quiet").stderr == ""
    assert run("quantize", out, "--to", "q8", tmp_path / "n.gguf").stderr.count("re-quantised") == 1
    assert run("quantize", folder, out, "--to", "q3", "--force").exit_code == 2
    assert run("quantize", folder, out).exit_code == 2


def test_a_configuration_that_would_come_back_changed_is_noticed() -> None:
    config = tiny.random_config("qwen3", head_dim=16)
    fields = {name: getattr(config, name) for name in config.__slots__}
    assert lost(config, config) == []
    assert lost(config, ModelConfig(**fields | {"attention_bias": True})) == ["attention_bias"]
    assert lost(config, ModelConfig(**fields | {"rope_theta": 1e5})) == ["rope_theta", "rope scaling"]
