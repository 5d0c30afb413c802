"""What a model is: its sizes, read from a Hugging Face config.json or from GGUF metadata, and validated.

Neighbours: models/ turns a ModelConfig into tensor names and a forward pass; weights/ reads the bytes and knows no
model. Sources: the configuration classes of transformers 5 (meaning and defaults of config.json's fields) and the GGUF
specification (metadata keys). What a file says and this module does not know is an error that names it: a model that
loads is computed the way its makers meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config_fields import BIG, INT_RANGES, MAX_EXPERTS_IN_ALL, check_int, check_number, show
from .json_file import read_json
from .types import ModelError

ARCHITECTURES = ("qwen3", "qwen3_moe", "qwen2", "qwen2_moe", "llama")
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_KINDS = ("linear", "llama3", "yarn", "factors")

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
            check_number(f"rope scaling {name}", getattr(self, name), above=0.0, high=1e6)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_number(f"rope scaling {name}", getattr(self, name), low=0.0, high=1e6)
        for divisor in self.factors:
            check_number("rope scaling factors", divisor, above=0.0, high=1e6)
        if not isinstance(self.truncate, bool):
            raise ModelError(f"rope scaling truncate must be true or false, got {self.truncate!r}")
        if self.kind in ("llama3", "yarn"):
            check_int("rope scaling original_max_position_embeddings", self.original_max_position_embeddings, 1, BIG)
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
        for name, (low, high) in INT_RANGES.items():
            value = getattr(self, name)
            if not (value is None and name in _MAY_BE_NONE):
                check_int(name, value, low, high)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ModelError(f"{name} must be true or false, got {show(getattr(self, name))}")
        check_number("rms_norm_eps", self.rms_norm_eps, low=0.0, high=1.0)
        check_number("rope_theta", self.rope_theta, above=1.0, high=1e18)
        check_number("expert_weights_scale", self.expert_weights_scale, above=0.0, high=1e6)
        for token in self.eos_token_ids:
            check_int("eos_token_id", token, 0, BIG)
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
                raise ModelError(f"rope_scaling must be a RopeScaling, got {show(self.rope_scaling)}")
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
                    f"layer_types[{layer}] {show(kind)} is not supported; supported: {', '.join(LAYER_TYPES)}"
                )
        if "sliding_attention" in self.layer_types and not self.use_sliding_window:
            raise ModelError("layer_types has sliding_attention layers but use_sliding_window is false")

    def _validate_experts(self) -> None:
        for layer in self.dense_layers:
            check_int("dense_layers", layer, 0, self.num_hidden_layers - 1)
        if self.num_experts == 0:
            return
        if not 1 <= self.num_experts_used <= self.num_experts:
            raise ModelError(
                f"num_experts_used must be from 1 to num_experts = {self.num_experts}, got {self.num_experts_used}"
            )
        if self.num_hidden_layers * self.num_experts > MAX_EXPERTS_IN_ALL:
            raise ModelError(
                f"num_hidden_layers * num_experts must be at most {MAX_EXPERTS_IN_ALL}, "
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
        from . import config_hf  # makes ModelConfigs, so it imports this module

        if isinstance(source, (str, Path)):
            path = Path(source)
            folder = path if path.is_dir() else path.parent
            path = folder / "config.json" if path.is_dir() else path
            if generation_config is None and (folder / "generation_config.json").is_file():
                generation_config = read_json(folder / "generation_config.json")
            source, where = read_json(path), str(path)
        else:
            where = "config.json"
        try:
            return config_hf.from_hf(source, generation_config or {})
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
        from . import config_gguf  # makes ModelConfigs, so it imports this module

        try:
            return config_gguf.from_gguf(metadata, tensor_shapes)
        except ModelError as error:
            raise ModelError(f"GGUF metadata: {error}") from None


Qwen3Config = ModelConfig
