"""What a model is: its sizes, read from a Hugging Face config.json or from GGUF metadata, and validated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. kind: "linear", "llama3" or "yarn"; the other fields by kind."""

    kind: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None: from factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder-only model. `Qwen3Config` is this class."""

    architecture: str = "qwen3"  # "qwen3", "qwen3_moe", "qwen2", "qwen2_moe", "llama"
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
    layer_types: tuple[str, ...] | None = None  # "full_attention" / "sliding_attention" per layer; None: by the rule
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

    def q_proj_dim(self) -> int:
        """Outputs of q_proj: num_attention_heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    def kv_proj_dim(self) -> int:
        """Outputs of k_proj and of v_proj: num_key_value_heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """The layer's sliding window in tokens (a row sees itself and the window-1 before it), None for all."""
        raise NotImplementedError

    def is_moe(self, layer: int) -> bool:
        """Whether the layer routes over experts."""
        return self.num_experts > 0 and layer not in self.dense_layers


Qwen3Config = ModelConfig
