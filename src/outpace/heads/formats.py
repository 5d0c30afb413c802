"""How public checkpoints spell a head: each format's names, fields and conventions become one description.

Neighbours: loading.py opens the files, calls `read_head` or `read_gguf` here and checks the result against the target.
Nothing is decoded. docs/heads.md has a table of these facts and where each was read. Two kinds of layer ids are in use:
"outputs", id i is the output of layer i; "inputs", id i is what enters layer i, the output of layer i - 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import ModelConfig
from ..config_fields import BIG, Reader, check_int, show
from ..models.gguf_names import BLOCK, half_split_order
from ..models.loading import nextn_layer, split_fused_experts, with_rope_factors
from ..types import ModelError
from ..weights.tensor import Tensor

REFUSED = {"peagle": "P-EAGLE", "dflash2": "DFlash2", "xpress": "XPress"}
SUPPORTED = (
    "EAGLE-3 (SpecForge, SafeAILab, speculators, DeepSpec, GGUF), DFlash and DSpark (z-lab, SpecForge, speculators, "
    "DeepSpec), MTP (mtp.*, MiMo, speculators, GGUF nextn)"
)
# What transformers' configuration classes assume where a file, saved as a difference from them, is silent.
_SILENT = {
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    },
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
}  # fmt: skip
_MARKOV = ("vanilla", "gated", "rnn")


@dataclass(slots=True)
class Found:
    """What a file says: fields of HeadConfig, tensors by canonical name, and for each convention where it is from.

    d2t: "offset" or "absolute", how the tensor of that name counts.
    """

    format: str
    layers: ModelConfig
    tensors: dict[str, Tensor]
    fields: dict[str, Any]
    d2t: str = "offset"
    target_layers: int | None = None  # where the file tells
    origins: dict[str, str] = field(default_factory=dict)

    def settle(self, name: str, value: Any, origin: str) -> None:
        """Sets a convention."""
        self.fields[name], self.origins[name] = value, origin


def read_head(data: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig) -> Found:
    """A safetensors head. data: config.json, {} where there is none. Raises ModelError for what is not supported."""
    read = Reader(data)
    names = read.items("architectures") or []
    kind = read.text("speculators_model_type", "").lower()
    known = " ".join([kind, *map(str, names)]).lower().replace("_", "").replace("-", "")
    for word, name in REFUSED.items():
        if word in known:
            raise ModelError(f"{name} heads are not supported; supported: {SUPPORTED}")
    if kind:
        makers = {"eagle3": _speculators_eagle3, "dflash": _speculators_dflash, "dspark": _speculators_dflash}
        if kind == "mtp":
            return _mtp("speculators MTP", data, tensors, target)
        if kind not in makers:
            raise ModelError(f"speculators_model_type {show(kind)} is not supported; supported: {SUPPORTED}")
        return makers[kind](data, tensors, target)
    if any(name.startswith("mtp.") for name in tensors):
        return _mtp("native MTP", data, tensors, target)
    if any(name.startswith("model.mtp_layers.") for name in tensors):
        return _mtp("MiMo MTP", data, tensors, target)
    if "dspark" in known or "dflash" in known:
        return _dflash(data, tensors, target, known)
    if "eagle3" in known or {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & set(tensors):
        return _eagle3(data, tensors, target, known)
    said = f"architectures {show(names)}" if names else "no config.json and no known tensor names"
    raise ModelError(f"not a head of a known format ({said}); supported: {SUPPORTED}")


# --------------------------------------------------------------------------------------------------------- EAGLE-3


def _eagle3(data: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig, known: str) -> Found:
    """SpecForge and SafeAILab (llama layers), DeepSpec (qwen3 layers, full vocabulary): one flat config."""
    deepspec = "qwen3eagle3model" in known
    layers = _layers({"model_type": "qwen3" if deepspec else "llama"} | _plain(data), "config.json")
    found = Found("DeepSpec EAGLE-3" if deepspec else "SpecForge EAGLE-3", layers, _named(tensors), {})
    read, nested = Reader(data), Reader(_object(data, "eagle_config"))
    if nested.flag("use_aux_hidden_state", True) is False:
        raise ModelError("eagle_config.use_aux_hidden_state is false: only heads that tap several layers are supported")
    if deepspec:
        _taps(found, data, "target_layer_ids", "outputs", "DeepSpec")
    else:
        name = "eagle_aux_hidden_state_layer_ids"
        source = nested.data if nested.get(name) is not None else data
        _taps(found, source, name, "outputs", "SGLang", target)
    _eagle3_fields(found, read)
    return found


def _speculators_eagle3(data: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig) -> Found:
    found = Found("speculators EAGLE-3", _nested_layers(data), _named(tensors), {})
    _taps(found, data, "eagle_aux_hidden_state_layer_ids", "inputs", "speculators and vLLM", target)
    _eagle3_fields(found, Reader(data))
    return found


def _eagle3_fields(found: Found, read: Reader) -> None:
    found.fields["algorithm"] = "eagle3"
    found.fields["draft_vocab_size"] = read.integer("draft_vocab_size", found.layers.vocab_size, field="vocab_size")
    if (width := read.get("target_hidden_size")) is not None:
        found.fields["target_hidden_size"] = check_int("target_hidden_size", width, 1, BIG)
    for name in ("norm_before_residual", "norm_output"):
        _flag(found, read, name)
    whole, each = read.flag("norm_before_fc", False), read.flag("fc_norm", False)
    if whole and each:
        raise ModelError("norm_before_fc and fc_norm cannot both be true")
    said = "norm_before_fc" if whole else "fc_norm" if each else "norm_before_fc and fc_norm"
    missing = read.get("norm_before_fc") is None and read.get("fc_norm") is None
    origin = "default: no norm before fc" if missing else f"{said} in config.json"
    found.settle("feature_norm", "whole" if whole else "each" if each else "none", origin)


# ---------------------------------------------------------------------------------------------------- DFlash, DSpark


def _dflash(data: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig, known: str) -> Found:
    """z-lab and SpecForge (fields in dflash_config), DeepSpec (flat): qwen3 layers."""
    deepspec = "qwen3dsparkmodel" in known or "qwen3dflashmodel" in known
    maker = "DeepSpec" if deepspec else "SpecForge" if "dspark" in known else "z-lab"
    merged = {**_object(data, "dflash_config"), **data}
    dspark = Reader(merged).integer("markov_rank", 0) > 0 or ("dspark" in known and not deepspec)
    found = Found(
        f"{maker} {'DSpark' if dspark else 'DFlash'}", _layers(_as_qwen3(data), "config.json"), _named(tensors), {}
    )
    _taps(found, merged, "target_layer_ids", "outputs", maker)
    _dflash_fields(found, merged, sample=deepspec or dspark)
    return found


def _speculators_dflash(data: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig) -> Found:
    dspark = data["speculators_model_type"].lower() == "dspark"
    found = Found(
        f"speculators {'DSpark' if dspark else 'DFlash'}", _nested_layers(data, qwen3=True), _named(tensors), {}
    )
    _taps(found, data, "aux_hidden_state_layer_ids", "inputs", "speculators and vLLM")
    if dspark:
        data = {
            "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
            "confidence_head_with_markov": True, **data,
        }  # fmt: skip
    _dflash_fields(found, data, sample=dspark)
    return found


def _dflash_fields(found: Found, data: Mapping[str, Any], sample: bool) -> None:
    read = Reader(data)
    found.fields |= {
        "algorithm": "dflash",
        "draft_vocab_size": read.integer("draft_vocab_size", found.layers.vocab_size, field="vocab_size"),
        "block_size": read.integer("block_size"),
        "mask_token": read.integer("mask_token_id"),
    }
    _flag(found, read, "sample_from_anchor", sample)
    _flag(found, read, "sliding_window_non_causal")
    rank = read.integer("markov_rank", 0)
    kind = read.text("markov_head_type", "vanilla").lower()
    if rank and kind not in _MARKOV:
        raise ModelError(f"markov_head_type {show(kind)} is not supported; supported: {', '.join(_MARKOV)}")
    found.fields |= {"markov": kind if rank else "none", "markov_rank": rank}
    if read.flag("enable_confidence_head", False):
        both = read.flag("confidence_head_with_markov", True)
        found.fields["confidence"] = "hidden_markov" if both else "hidden"
    if (layers := read.get("num_target_layers")) is not None:
        found.target_layers = check_int("num_target_layers", layers, 1, 1024)


# ------------------------------------------------------------------------------------------------------------- MTP

_MTP_NAMES = {  # canonical -> (mtp.*, MiMo and speculators)
    "fc.": ("fc.", "input_proj."),
    "embedding_norm.": ("pre_fc_norm_embedding.", "token_layernorm."),
    "hidden_norm.": ("pre_fc_norm_hidden.", "hidden_layernorm."),
    "model.norm.": ("norm.", "final_layernorm."),
    "model.layers.0.": ("layers.0.", ""),
}
_OTHER_NORMS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def _mtp(kind: str, data: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig) -> Found:
    """A head inside its model or in a file of its own; tensors of the model are not looked at."""
    layers, target_layers = target, None
    if kind == "speculators MTP":
        layers = _nested_layers(data)
        target_layers = layers.num_hidden_layers
    model_type = data.get("model_type", target.architecture)
    if model_type in _OTHER_NORMS:
        raise ModelError(
            f"heads of {model_type} models are not supported: their attention is gated and their norms multiply by "
            "1 + weight"
        )
    count = Reader(data).integer("num_nextn_predict_layers", 1)
    prefix = {"native MTP": "mtp.", "MiMo MTP": "model.mtp_layers.0.", "speculators MTP": "mtp_layers.0."}[kind]
    own = prefix if kind == "native MTP" else prefix.removesuffix("0.")
    if count > 1 or any(re.match(re.escape(own) + r"(layers\.)?[1-9]", name) for name in tensors):
        raise ModelError("heads of several MTP layers are not supported; supported: 1")
    named: dict[str, Tensor] = {}
    spelling = 0 if kind == "native MTP" else 1
    for name, tensor in tensors.items():
        if not name.startswith(own):
            if kind == "speculators MTP":
                named[name] = tensor
            continue
        rest = name.removeprefix(prefix)
        for ours, theirs in _MTP_NAMES.items():
            if rest.startswith(theirs[spelling]):
                named[ours + rest.removeprefix(theirs[spelling])] = tensor
                break
        else:
            named[name] = tensor
    found = Found(kind, one_full_layer(layers), _experts(named, layers), {}, target_layers=target_layers)
    _mtp_fields(found, target, kind)
    if kind == "speculators MTP":  # ours alone: the package's heads guess the whole vocabulary
        found.fields["draft_vocab_size"] = Reader(data).integer("draft_vocab_size", target.vocab_size)
    if kind == "MiMo MTP":
        found.settle("concat", "hidden_first", "default of MiMo MTP: hidden, embedding (vLLM)")
    return found


def _mtp_fields(found: Found, target: ModelConfig, kind: str) -> None:
    found.fields |= {"algorithm": "mtp", "draft_vocab_size": target.vocab_size}
    found.settle("concat", "embedding_first", f"default of {kind}: embedding, hidden")
    if kind == "speculators MTP":
        tap, why = target.num_hidden_layers - 1, "before the final norm (what its trainer reads)"
    else:
        tap, why = target.num_hidden_layers, "after the final norm (vLLM, llama.cpp)"
    found.settle("taps", (tap,), f"default of {kind}: {why}")
    found.settle("norm_output", True, f"default of {kind}: its own hidden state after its norm")


def one_full_layer(layers: ModelConfig) -> ModelConfig:
    """The configuration of an MTP head's layer: one of the model's, seeing the whole text."""
    return replace(
        layers, num_hidden_layers=1, layer_types=None, use_sliding_window=False, dense_layers=(),
        tie_word_embeddings=False,
    )  # fmt: skip


def _experts(tensors: dict[str, Tensor], layers: ModelConfig) -> dict[str, Tensor]:
    """transformers' fused experts as one matrix an expert; other shapes stay, to be reported."""
    if layers.num_experts:
        split_fused_experts(one_full_layer(layers), tensors)
    return tensors


# ------------------------------------------------------------------------------------------------------------- GGUF

_GGUF_EAGLE3 = {
    "fc.weight": "fc.weight",
    "d2t": "d2t",
    "d2t.weight": "d2t",
    "blk.0.attn_norm_2.weight": "hidden_norm.weight",
}
_GGUF_NEXTN = {
    "eh_proj": "fc.weight", "enorm": "embedding_norm.weight", "hnorm": "hidden_norm.weight",
    "shared_head_norm": "model.norm.weight", "embed_tokens": "model.embed_tokens.weight",
    "shared_head_head": "lm_head.weight",
}  # fmt: skip
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig) -> Found:
    """A GGUF head: an eagle3 file, or a model with nextn tensors. Raises ModelError for what is not supported."""
    name = Reader(metadata).text("general.architecture", "")
    if name == "eagle3":
        return _gguf_eagle3(metadata, tensors, target)
    if any(".nextn." in tensor for tensor in tensors):
        return _gguf_nextn(name, metadata, tensors, target)
    raise ModelError(f"GGUF files of architecture {show(name)} hold no head of a known format; supported: {SUPPORTED}")


def _gguf_eagle3(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig) -> Found:
    as_llama = {re.sub(r"^eagle3\.", "llama.", key): value for key, value in metadata.items()}
    as_llama["general.architecture"] = "llama"
    own = Reader(metadata, "eagle3.")
    if own.flag("norm_before_fc", False):
        raise ModelError("eagle3.norm_before_fc true is not supported; supported: false")
    rest = dict(tensors)
    factors = [rest.pop(name) for name in ("rope_freqs.weight", "blk.0.rope_freqs.weight") if name in rest]
    layers = ModelConfig.from_gguf(as_llama, {name: tensor.shape for name, tensor in rest.items()})
    if factors:
        layers = with_rope_factors(layers, factors[0])
    layers = replace(layers, tie_word_embeddings=False)
    named = {}
    for name, tensor in rest.items():
        ours = _GGUF_EAGLE3.get(name) or _GGUF_TOP.get(name) or _block_name(name, 0)
        heads = {"q": layers.num_attention_heads, "k": layers.num_key_value_heads}.get(
            name[len("blk.0.attn_") :][:1], 0
        )
        if name.startswith(("blk.0.attn_q.", "blk.0.attn_k.")) and tensor.shape[:1] == (heads * layers.head_dim,):
            tensor = tensor.select(half_split_order(heads, layers.head_dim))  # llama.cpp turns neighbours
        named[ours] = tensor
    draft = named["d2t"].shape[0] if "d2t" in named and named["d2t"].shape else layers.vocab_size
    found = Found("GGUF EAGLE-3", layers, named, {"algorithm": "eagle3", "draft_vocab_size": draft}, d2t="absolute")
    found.fields["target_hidden_size"] = own.integer("target_hidden_size", layers.hidden_size, field="hidden_size")
    key = "target_layers" if own.get("target_layers") is not None else "extract_layers"
    _taps(found, {key: own.items(key)}, key, "inputs", "llama.cpp")
    _flag(found, own, "norm_before_residual")
    found.settle("norm_output", False, "default of GGUF EAGLE-3 (llama.cpp)")
    found.settle("feature_norm", "none", "default of GGUF EAGLE-3 (llama.cpp)")
    return found


def _gguf_nextn(name: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig) -> Found:
    if name not in ("qwen3", "qwen3moe", "qwen2", "qwen2moe"):
        raise ModelError(f"nextn heads of GGUF architecture {show(name)} are not supported; supported: qwen3, qwen2")
    read = Reader(metadata, name + ".")
    count = read.integer("nextn_predict_layers", 0)
    if count != 1:
        raise ModelError(f"{name}.nextn_predict_layers {count} is not supported; supported: 1")
    layer, _ = nextn_layer(metadata)
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        prefix = f"blk.{layer}."
        if not key.startswith(prefix):
            continue  # the model's
        part = re.fullmatch(re.escape(prefix) + r"nextn\.(\w+)\.weight", key)
        named[_GGUF_NEXTN.get(part[1], key) if part else _block_name(key, layer)] = tensor
    found = Found("GGUF nextn", one_full_layer(target), named, {}, target_layers=layer)
    _mtp_fields(found, target, "GGUF nextn")
    return found


def _block_name(name: str, layer: int) -> str:
    """blk.<layer>.<part>.<weight or bias> as the name of a head's only layer; other names stay, to be reported."""
    match = re.fullmatch(rf"blk\.{layer}\.(\w+)\.(weight|bias)", name)
    return f"model.layers.0.{BLOCK[match[1]]}.{match[2]}" if match and match[1] in BLOCK else name


# ---------------------------------------------------------------------------------------------------------- the rest


def _layers(data: Mapping[str, Any], where: str) -> ModelConfig:
    try:
        return replace(ModelConfig.from_hf(data), tie_word_embeddings=False)
    except ModelError as error:
        raise ModelError(
            str(error).removeprefix("config.json: ") if where == "config.json" else f"{where}: {error}"
        ) from None


def _nested_layers(data: Mapping[str, Any], qwen3: bool = False) -> ModelConfig:
    """speculators' transformer_layer_config; qwen3: as `_as_qwen3`."""
    nested = _object(data, "transformer_layer_config")
    kind = nested.get("model_type", "qwen3")
    silent = _SILENT.get(kind, {}) if isinstance(kind, str) else {}
    full = {**silent, "model_type": kind, **nested}
    return _layers(_as_qwen3(full) if qwen3 else full, "transformer_layer_config")


def _as_qwen3(data: Mapping[str, Any]) -> dict[str, Any]:
    """DFlash layers are Qwen3's, whatever the class is called whose sizes they borrow."""
    read = Reader(data)
    changed: dict[str, Any] = _plain(data) | {"model_type": "qwen3"}
    if read.get("head_dim") is None and read.get("model_type") not in (None, "qwen3"):
        changed["head_dim"] = read.integer("hidden_size") // max(read.integer("num_attention_heads"), 1)
    return changed


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}


def _object(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{name} must be an object, got {show(value)}")
    return value


def _flag(found: Found, read: Reader, name: str, default: bool = False) -> None:
    given = read.get(name) is not None
    origin = f"{read.prefix}{name} in the file" if given else f"default of {found.format}"
    found.settle(name, read.flag(name, default), origin)


def _taps(
    found: Found, data: Mapping[str, Any], name: str, rule: str, by: str, target: ModelConfig | None = None
) -> None:
    """Layer ids as our taps. rule: how these ids count. target: where given, its default layers may stand in."""
    ids = Reader(data).items(name)
    if ids is None and target is not None:
        # The default is the same everywhere: inputs of a low, a middle and a high layer.
        layers = target.num_hidden_layers
        taps = (1, layers // 2 - 1, layers - 4)
        if layers < 6 or len(set(taps)) < 3:
            raise ModelError(f"{name} is missing, and a target of {layers} layers is too small for the default layers")
        found.settle("taps", taps, f"default: inputs of layers 2, {layers // 2}, {layers - 3} (vLLM, SGLang)")
        return
    if ids is None:
        raise ModelError(f"{name} is missing")
    taken = tuple(check_int(name, value, -1, 4096) - (rule == "inputs") for value in ids)
    found.settle("taps", taken, f"{name} {list(ids)}, {rule} of these layers ({by})")


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of EAGLE-3, DFlash and DSpark checkpoints as canonical ones. Raises ModelError where two become one."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        ours = re.sub(r"^(model\.)?midlayer\.", "layers.0.", name).removeprefix("model.")
        ours = "hidden_norm.weight" if ours == "layers.0.hidden_norm.weight" else ours
        ours = re.sub(r"^(layers\.\d+\.|norm\.|embed_tokens\.)", r"model.\1", ours)
        ours = re.sub(r"^markov_head\.(markov_w[12]\.)", r"\1", ours)
        ours = re.sub(r"^markov_head\.(gate|joint)_proj\.", r"markov_\1.", ours)
        ours = re.sub(r"^confidence_head\.proj\.", "confidence.", ours)
        if ours in named:
            raise ModelError(f"tensor {name[:120]!r} is there twice, under two names")
        named[ours] = tensor
    return named
