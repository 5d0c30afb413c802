"""What a model is: its sizes, read from a Hugging Face config.json or from GGUF metadata, and validated.

Neighbours: models/ turns a ModelConfig into tensor names and a forward pass; weights/ reads the bytes and knows no
model. Sources: the configuration classes of transformers 5 (meaning and defaults of config.json's fields) and the GGUF
specification (metadata keys). What a file says and this module does not know is an error that names it: a model that
loads is computed the way its makers meant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .types import ModelError

ARCHITECTURES = ("qwen3", "qwen3_moe", "qwen2", "qwen2_moe", "llama")
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_KINDS = ("linear", "llama3", "yarn", "factors")

MAX_JSON_BYTES = 16 << 20  # a config.json has a few kilobytes; more is not a configuration
_BIG = 2**31 - 1
_MAX_EXPERTS_IN_ALL = 2**17  # layers * experts: bounds the list of tensor names
_INT_RANGES = {  # field: (lowest, highest) allowed value; the upper ends bound what a hostile file can ask for
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**18),
    "intermediate_size": (1, 2**21),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (2, 8192),
    "max_position_embeddings": (1, _BIG),
    "sliding_window": (1, _BIG),
    "max_window_layers": (0, _BIG),
    "num_experts": (0, 4096),
    "num_experts_used": (0, 4096),
    "expert_ffn_size": (0, 2**21),
    "shared_expert_ffn_size": (0, 2**21),
    "bos_token_id": (0, _BIG),
    "pad_token_id": (0, _BIG),
}
_FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "attention_out_bias",
    "mlp_bias",
    "qk_norm",
    "use_sliding_window",
    "norm_topk_prob",
)
_MAY_BE_NONE = ("sliding_window", "bos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched; models/rotary.py has the formulas.

    kind: "linear", "llama3", "yarn", or "factors" (a GGUF file's own divisor for each frequency); the other fields by
    kind.
    """

    kind: str
    factor: float = 1.0  # not for "factors"
    original_max_position_embeddings: int | None = None  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None: from factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    factors: tuple[float, ...] = ()  # factors: head_dim / 2 divisors

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ModelError(f"rope scaling type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _check_number(f"rope scaling {name}", getattr(self, name), above=0.0)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _check_number(f"rope scaling {name}", getattr(self, name), low=0.0)
        for divisor in self.factors:
            _check_number("rope scaling factors", divisor, above=0.0)
        if not isinstance(self.truncate, bool):
            raise ModelError(f"rope scaling truncate must be true or false, got {self.truncate!r}")
        if self.kind in ("llama3", "yarn"):
            _check_int("rope scaling original_max_position_embeddings", self.original_max_position_embeddings, 1, _BIG)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"rope scaling high_freq_factor must be greater than low_freq_factor, got {self.high_freq_factor!r} "
                f"and {self.low_freq_factor!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder-only model. `Qwen3Config` is this class.

    Raises ModelError, naming field, value and what is allowed, when made with impossible values.
    """

    architecture: str = "qwen3"  # one of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # bias on q, k and v
    attention_out_bias: bool = False  # bias on o
    mlp_bias: bool = False
    qk_norm: bool = True
    sliding_window: int | None = None
    max_window_layers: int = 0
    use_sliding_window: bool = False
    layer_types: tuple[str, ...] | None = None  # one of LAYER_TYPES per layer; None: by the rule in `window`
    num_experts: int = 0  # 0: dense
    num_experts_used: int = 0
    expert_ffn_size: int = 0
    shared_expert_ffn_size: int = 0  # 0: no shared expert
    expert_weights_scale: float = 1.0  # multiplies the routing weights
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()  # layers of a MoE model that keep the dense MLP
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # union of config.json and generation_config.json
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        self.validate()

    def q_proj_dim(self) -> int:
        """Outputs of q_proj: num_attention_heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    def kv_proj_dim(self) -> int:
        """Outputs of k_proj and of v_proj: num_key_value_heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """The layer's sliding window in tokens (a row sees itself and the window-1 before it), None for all."""
        if not self.use_sliding_window or self.sliding_window is None:
            return None
        if self.layer_types is None:
            return self.sliding_window if layer >= self.max_window_layers else None
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def is_moe(self, layer: int) -> bool:
        """Whether the layer routes over experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def validate(self) -> None:
        """Checks every field's type and range and that they fit together. Raises ModelError."""
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        if self.hidden_act != "silu":
            raise ModelError(f"hidden_act {self.hidden_act!r} is not supported; supported: silu")
        for name, (low, high) in _INT_RANGES.items():
            value = getattr(self, name)
            if not (value is None and name in _MAY_BE_NONE):
                _check_int(name, value, low, high)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ModelError(f"{name} must be true or false, got {_show(getattr(self, name))}")
        _check_number("rms_norm_eps", self.rms_norm_eps, low=0.0, high=1.0)
        _check_number("rope_theta", self.rope_theta, above=1.0)
        _check_number("expert_weights_scale", self.expert_weights_scale, above=0.0)
        for token in self.eos_token_ids:
            _check_int("eos_token_id", token, 0, _BIG)
        self._validate_attention()
        self._validate_experts()

    def _validate_attention(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_key_value_heads must divide num_attention_heads = {self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even (rotary embeddings turn pairs), got {self.head_dim}")
        if self.rope_scaling is not None:
            if not isinstance(self.rope_scaling, RopeScaling):
                raise ModelError(f"rope_scaling must be a RopeScaling, got {_show(self.rope_scaling)}")
            if self.rope_scaling.kind == "factors" and len(self.rope_scaling.factors) != self.head_dim // 2:
                raise ModelError(
                    f"rope scaling factors must be head_dim / 2 = {self.head_dim // 2} numbers, "
                    f"got {len(self.rope_scaling.factors)}"
                )
        if self.use_sliding_window and self.sliding_window is None:
            raise ModelError("use_sliding_window is true but sliding_window is missing")
        if self.layer_types is None:
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise ModelError(
                f"layer_types must name each of the {self.num_hidden_layers} layers, got {len(self.layer_types)} names"
            )
        for layer, kind in enumerate(self.layer_types):
            if kind not in LAYER_TYPES:
                raise ModelError(
                    f"layer_types[{layer}] {_show(kind)} is not supported; supported: {', '.join(LAYER_TYPES)}"
                )
        if "sliding_attention" in self.layer_types and not self.use_sliding_window:
            raise ModelError("layer_types has sliding_attention layers but use_sliding_window is false")

    def _validate_experts(self) -> None:
        for layer in self.dense_layers:
            _check_int("dense_layers", layer, 0, self.num_hidden_layers - 1)
        if self.num_experts == 0:
            return
        if not 1 <= self.num_experts_used <= self.num_experts:
            raise ModelError(
                f"num_experts_used must be from 1 to num_experts = {self.num_experts}, got {self.num_experts_used}"
            )
        if self.num_hidden_layers * self.num_experts > _MAX_EXPERTS_IN_ALL:
            raise ModelError(
                f"num_hidden_layers * num_experts must be at most {_MAX_EXPERTS_IN_ALL}, "
                f"got {self.num_hidden_layers} * {self.num_experts}"
            )
        if self.expert_ffn_size < 1:
            raise ModelError(f"expert_ffn_size must be at least 1 in a mixture of experts, got {self.expert_ffn_size}")

    @classmethod
    def from_hf(
        cls, source: Mapping[str, Any] | str | Path, generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Reads a Hugging Face configuration.

        source: the parsed config.json, its path, or its folder; from a folder generation_config.json is read too
        unless one is given. Raises ModelError naming the file and the field.
        """
        if isinstance(source, (str, Path)):
            path = Path(source)
            folder = path if path.is_dir() else path.parent
            path = folder / "config.json" if path.is_dir() else path
            if generation_config is None and (folder / "generation_config.json").is_file():
                generation_config = read_json(folder / "generation_config.json")
            data, where = read_json(path), str(path)
        else:
            data, where = source, "config.json"
        try:
            return _from_hf(data, generation_config or {})
        except ModelError as error:
            raise ModelError(f"{where}: {error}") from None

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_shapes: Mapping[str, Sequence[int]] | None = None
    ) -> ModelConfig:
        """Reads GGUF metadata.

        tensor_shapes: GGUF tensor name -> shape in PyTorch order. GGUF has no switch for biases, q/k norms and a tied
        head: the tensors that are there say it. Without shapes the architecture's usual form is taken. Frequency
        divisors (`rope_freqs.weight`) are data, not metadata: models/loading.py adds them. Raises ModelError.
        """
        try:
            return _from_gguf(metadata, tensor_shapes)
        except ModelError as error:
            raise ModelError(f"GGUF metadata: {error}") from None


Qwen3Config = ModelConfig


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object. Raises ModelError when it is missing, too big, damaged or something else."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_JSON_BYTES:
        raise ModelError(f"{path}: is larger than {MAX_JSON_BYTES >> 20} MiB, which no such file needs")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(data).__name__}")
    return data


# ----------------------------------------------------------------------------------------------- checks and reading


def _show(value: object) -> str:
    """A value for an error message, cut so that a hostile file cannot flood the screen."""
    text = repr(value[:60] if isinstance(value, str) else value) if not isinstance(value, int) else _show_int(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _show_int(value: int) -> str:
    return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"


def _check_int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, np.integer):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelError(f"{name} must be a whole number from {low} to {high}, got {_show(value)}")
    return value


def _check_number(
    name: str, value: object, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf
) -> float:
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**30:
        value = float(value)
    if not isinstance(value, float) or not math.isfinite(value) or not low <= value <= high or value <= above:
        rule = f"greater than {above:g}" if above > -math.inf else f"at least {low:g}" if low > -math.inf else "finite"
        rule += f" and at most {high:g}" if high < math.inf else ""
        raise ModelError(f"{name} must be a number {rule}, got {_show(value)}")
    return value


class _Reader:
    """Typed, range-checked access to an untrusted mapping. None and a missing key are the same."""

    def __init__(self, data: Mapping[str, Any], prefix: str = "") -> None:
        self.data = data
        self.prefix = prefix

    def get(self, name: str) -> Any:
        return self.data.get(self.prefix + name)

    def integer(self, name: str, default: int | None = None, *, field: str = "", high: int = _BIG) -> int:
        """field: the ModelConfig field whose range applies. Without a default the value must be there."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"{self.prefix}{name} is missing")
        return _check_int(self.prefix + name, value, *_INT_RANGES.get(field or name, (0, high)))

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        return default if value is None else _check_number(self.prefix + name, value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name, 0.0)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, (bool, np.bool_)):
            raise ModelError(f"{self.prefix}{name} must be true or false, got {_show(value)}")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"{self.prefix}{name} must be a string, got {_show(value)}")
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple, np.ndarray)) or np.ndim(value) != 1 or len(value) > 4096:
            raise ModelError(f"{self.prefix}{name} must be a list of at most 4096 entries, got {_show(value)}")
        return list(value)

    def token(self, name: str) -> int | None:
        """A token id; -1 is an old spelling of "none"."""
        value = self.get(name)
        return None if value is None or value == -1 else _check_int(self.prefix + name, value, 0, _BIG)

    def tokens(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        values = self.items(name) if isinstance(self.get(name), (list, tuple)) else [self.get(name)]
        return tuple(_check_int(name, v, 0, _BIG) for v in values or () if v is not None and v != -1)


# --------------------------------------------------------------------------------------------- Hugging Face config.json

_ACTIVATIONS = {"silu": "silu", "swish": "silu"}
_ROPE_KEYS = {  # what a rope dictionary may say; a key outside changes the rotary embedding in a way we do not know
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "factor",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip


def _from_hf(data: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    read = _Reader(data)
    arch = read.text("model_type", "")
    if arch not in ARCHITECTURES:
        raise ModelError(f"model_type {_show(arch)} is not supported; supported: {', '.join(ARCHITECTURES)}")
    act = read.text("hidden_act", "silu")
    if act not in _ACTIVATIONS:
        raise ModelError(f"hidden_act {_show(act)} is not supported; supported: {', '.join(_ACTIVATIONS)}")

    layers = read.integer("num_hidden_layers")
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    positions = read.integer("max_position_embeddings")
    head_dim = 128 if arch == "qwen3" else max(hidden // heads, 1)
    theta, scaling = _hf_rope(read, positions)
    bias = read.flag("attention_bias", False)
    moe = arch in ("qwen3_moe", "qwen2_moe")
    use_window = arch != "llama" and read.flag("use_sliding_window", False)
    window = read.integer("sliding_window", 4096) if use_window else None
    experts = read.integer("num_local_experts" if "num_local_experts" in data else "num_experts", field="num_experts") \
        if moe else 0  # fmt: skip
    shared = read.integer("shared_expert_intermediate_size", field="shared_expert_ffn_size") \
        if arch == "qwen2_moe" else 0  # fmt: skip
    eos = dict.fromkeys((*read.tokens("eos_token_id"), *_Reader(generation).tokens("eos_token_id")))
    return ModelConfig(
        architecture=arch,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=read.integer("num_key_value_heads", heads),
        head_dim=read.integer("head_dim", head_dim),
        max_position_embeddings=positions,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        hidden_act=_ACTIVATIONS[act],
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        attention_bias={"qwen2": True, "qwen2_moe": read.flag("qkv_bias", True)}.get(arch, bias),
        attention_out_bias=bias and not arch.startswith("qwen2"),
        mlp_bias=arch == "llama" and read.flag("mlp_bias", False),
        qk_norm=arch.startswith("qwen3"),
        sliding_window=window,
        max_window_layers=read.integer("max_window_layers", 28),
        use_sliding_window=use_window,
        layer_types=_hf_layer_types(read, arch, layers, use_window),
        num_experts=experts,
        num_experts_used=read.integer("num_experts_per_tok", 8 if arch == "qwen3_moe" else 4) if experts else 0,
        expert_ffn_size=read.integer("moe_intermediate_size", field="expert_ffn_size") if experts else 0,
        shared_expert_ffn_size=shared,
        norm_topk_prob=read.flag("norm_topk_prob", False) if moe else True,
        dense_layers=_hf_dense_layers(read, layers) if experts else (),
        bos_token_id=read.token("bos_token_id"),
        eos_token_ids=tuple(eos),
        pad_token_id=read.token("pad_token_id"),
    )


def _hf_layer_types(read: _Reader, arch: str, layers: int, use_window: bool) -> tuple[str, ...] | None:
    """layer_types as given, or by the architecture's rule; None where that is `ModelConfig.window`'s own rule."""
    given = read.items("layer_types")
    rule: tuple[str, ...] | None = None
    if use_window and arch == "qwen3_moe":  # every layer, whatever max_window_layers says
        rule = ("sliding_attention",) * layers
        if given is not None and tuple(given) != rule:
            raise ModelError("layer_types of a qwen3_moe model with use_sliding_window must all be sliding_attention")
    elif use_window and arch == "qwen2_moe":  # every other layer below max_window_layers
        first_full = read.integer("max_window_layers", 28)
        rule = tuple(LAYER_TYPES[layer % 2 == 0 and layer < first_full] for layer in range(layers))
    elif arch == "llama" and given is not None and any(kind != "full_attention" for kind in given):
        raise ModelError(f"layer_types {_show(given)} is not supported in a llama model; supported: full_attention")
    return rule if given is None else tuple(given)


def _hf_dense_layers(read: _Reader, layers: int) -> tuple[int, ...]:
    """The layers of a MoE model that keep the dense MLP: mlp_only_layers and those between the sparse steps."""
    step = max(read.integer("decoder_sparse_step", 1), 1)
    only = [_check_int("mlp_only_layers", layer, 0, _BIG) for layer in read.items("mlp_only_layers") or ()]
    return tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step)


def _hf_rope(read: _Reader, positions: int) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling from either spelling: rope_theta + rope_scaling, or transformers 5's rope_parameters."""
    sources = [(name, read.get(name)) for name in ("rope_scaling", "rope_parameters") if read.get(name)]
    for name, value in sources:
        if not isinstance(value, Mapping):
            raise ModelError(f"{name} must be an object, got {_show(value)}")
    if len(sources) == 2 and dict(sources[0][1]) != dict(sources[1][1]):
        raise ModelError("rope_scaling and rope_parameters are both given and differ; keep one of them")
    name, data = sources[0] if sources else ("rope_parameters", {})
    unknown = sorted(str(key) for key in data if key not in _ROPE_KEYS)
    if unknown:
        raise ModelError(f"{name}: {_show(', '.join(unknown))} is not supported; supported: {', '.join(sorted(_ROPE_KEYS))}")
    rope = _Reader(data)
    partial = rope.number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor {partial!r} is not supported; supported: 1.0")
    theta = rope.number("rope_theta", read.number("rope_theta", 10_000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(f"{name}: rope type {_show(kind)} is not supported; supported: default, linear, llama3, yarn")
    original = read.integer("original_max_position_embeddings", rope.integer("original_max_position_embeddings", positions))
    if rope.get("factor") is None and kind != "yarn":
        raise ModelError(f"{name}: factor is missing")
    if kind == "llama3" and (rope.get("low_freq_factor") is None or rope.get("high_freq_factor") is None):
        raise ModelError(f"{name}: low_freq_factor or high_freq_factor is missing")
    scaling = RopeScaling(
        kind=kind,
        factor=rope.number("factor", positions / max(original, 1)),
        original_max_position_embeddings=None if kind == "linear" else original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
    return theta, scaling


# ------------------------------------------------------------------------------------------------------ GGUF metadata

_GGUF_ARCHITECTURES = {
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "llama": "llama",
}


def _from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None) -> ModelConfig:
    general = _Reader(metadata)
    name = general.text("general.architecture", "")
    if name not in _GGUF_ARCHITECTURES:
        raise ModelError(
            f"general.architecture {_show(name)} is not supported; supported: {', '.join(_GGUF_ARCHITECTURES)}"
        )
    arch = _GGUF_ARCHITECTURES[name]
    read = _Reader(metadata, name + ".")
    layers = read.integer("block_count", field="num_hidden_layers")
    hidden = read.integer("embedding_length", field="hidden_size")
    heads = read.integer("attention.head_count", field="num_attention_heads")
    head_dim = read.integer("attention.key_length", max(hidden // heads, 1), field="head_dim")
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.integer(key, head_dim) != head_dim:
            raise ModelError(f"{name}.{key} must equal the head's width {head_dim}, got {read.get(key)}")
    experts = read.integer("expert_count", 0, field="num_experts")
    if experts and arch not in ("qwen3_moe", "qwen2_moe"):
        raise ModelError(f"{name}.expert_count {experts} is not supported for architecture {name}; supported: 0")
    if not experts and arch in ("qwen3_moe", "qwen2_moe"):
        raise ModelError(f"{name}.expert_count is missing")
    if read.integer("expert_gating_func", 1) != 1:
        raise ModelError(f"{name}.expert_gating_func {read.get('expert_gating_func')} is not supported; supported: 1 (softmax)")
    dense = read.integer("feed_forward_length", None if not experts else 1, field="intermediate_size")
    positions = read.integer("context_length", field="max_position_embeddings")
    window = read.integer("attention.sliding_window", 0)
    shared = read.integer("expert_shared_feed_forward_length", 0, field="shared_expert_ffn_size")
    if arch == "qwen2_moe" and not shared and shapes is not None and "blk.0.ffn_up_shexp.weight" in shapes:
        shared = int(shapes["blk.0.ffn_up_shexp.weight"][0])
    usual_bias = arch.startswith("qwen2")
    tokenizer = _Reader(metadata, "tokenizer.ggml.")
    eos = [tokenizer.token(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]

    def has(tensor: str, usual: bool) -> bool:
        return usual if shapes is None else f"blk.0.{tensor}" in shapes

    return ModelConfig(
        architecture=arch,
        vocab_size=_gguf_vocab_size(metadata, read, shapes),
        hidden_size=hidden,
        intermediate_size=dense,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=read.integer("attention.head_count_kv", heads, field="num_key_value_heads"),
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=read.number("rope.freq_base", 10_000.0),
        rope_scaling=_gguf_rope(read, positions),
        tie_word_embeddings=shapes is not None and "output.weight" not in shapes,
        attention_bias=has("attn_q.bias", usual_bias),
        attention_out_bias=has("attn_output.bias", False),
        mlp_bias=has("ffn_up.bias", False),
        qk_norm=arch.startswith("qwen3"),
        sliding_window=window or None,
        use_sliding_window=window > 0,
        layer_types=_gguf_layer_types(read, layers) if window else None,
        num_experts=experts,
        num_experts_used=read.integer("expert_used_count", field="num_experts_used") if experts else 0,
        expert_ffn_size=_gguf_expert_size(read, shapes) if experts else 0,
        shared_expert_ffn_size=shared,
        expert_weights_scale=read.number("expert_weights_scale", 1.0) or 1.0,
        norm_topk_prob=read.flag("expert_weights_norm", arch != "qwen2_moe"),
        bos_token_id=tokenizer.token("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        pad_token_id=tokenizer.token("padding_token_id"),
    )


def _gguf_vocab_size(metadata: Mapping[str, Any], read: _Reader, shapes: Mapping[str, Sequence[int]] | None) -> int:
    """The embedding's rows, else the key, else the tokenizer's length: the rows may be padded beyond the others."""
    if shapes is not None and "token_embd.weight" in shapes:
        return _check_int("token_embd.weight rows", int(shapes["token_embd.weight"][0]), *_INT_RANGES["vocab_size"])
    tokens = metadata.get("tokenizer.ggml.tokens")
    return read.integer("vocab_size", len(tokens) if hasattr(tokens, "__len__") else None)


def _gguf_expert_size(read: _Reader, shapes: Mapping[str, Sequence[int]] | None) -> int:
    shape = (shapes or {}).get("blk.0.ffn_up_exps.weight", ())
    return read.integer("expert_feed_forward_length", int(shape[1]) if len(shape) == 3 else None, field="expert_ffn_size")


def _gguf_layer_types(read: _Reader, layers: int) -> tuple[str, ...]:
    """Which layers slide: a flag for each layer, or all of them."""
    pattern = read.items("attention.sliding_window_pattern")
    if pattern is None:
        return ("sliding_attention",) * layers
    return tuple(LAYER_TYPES[bool(slides)] for slides in pattern)


def _gguf_rope(read: _Reader, positions: int) -> RopeScaling | None:
    """llama.cpp keeps llama3's scaling as divisors in a tensor, so that only linear and yarn are metadata."""
    kind = read.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{read.prefix}rope.scaling.type {_show(kind)} is not supported; supported: none, linear, yarn")
    if read.get("rope.scaling.factor") is None:
        raise ModelError(f"{read.prefix}rope.scaling.factor is missing")
    factor = _check_number(f"{read.prefix}rope.scaling.factor", read.get("rope.scaling.factor"), above=0.0)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if read.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise ModelError(f"{read.prefix}rope.scaling.yarn_log_multiplier is not supported; supported: 0")
    # The file's factor multiplies YaRN's own one; transformers' attention_factor replaces it.
    scale = read.number("rope.scaling.attn_factor", 1.0) * read.number("rope.scaling.yarn_attn_factor", 1.0)
    own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=read.integer("rope.scaling.original_context_length", positions),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if scale == 1.0 else own * scale,
    )


