"""A model's tensors by their Hugging Face checkpoint names, with the shapes its configuration demands.

The one list of names in the project: loading checks files against it and every backend takes its tensors by it.
Matrices are in PyTorch order, [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator

from ..config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """name -> shape of every tensor of the model. A tied head has no tensor of its own."""
    hidden = config.hidden_size
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = (hidden,)
        tensors.update({prefix + "self_attn." + name: shape for name, shape in _attention(config)})
        tensors[prefix + "post_attention_layernorm.weight"] = (hidden,)
        tensors.update({prefix + "mlp." + name: shape for name, shape in _mlp(config, layer)})
    tensors[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        tensors[HEAD] = (config.vocab_size, hidden)
    return tensors


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether int8 backends hold this tensor in groups. What is small and decides stays float32: routers and gates of
    experts, a head's confidence."""
    small = (".mlp.gate.weight", ".shared_expert_gate.weight", "confidence.weight")
    return len(shape) == 2 and not name.endswith(small)


def _attention(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, out in (("q", config.q_proj_dim()), ("k", config.kv_proj_dim()), ("v", config.kv_proj_dim())):
        yield f"{name}_proj.weight", (out, config.hidden_size)
        if config.attention_bias:
            yield f"{name}_proj.bias", (out,)
    yield "o_proj.weight", (config.hidden_size, config.q_proj_dim())
    if config.attention_out_bias:
        yield "o_proj.bias", (config.hidden_size,)
    if config.qk_norm:
        yield "q_norm.weight", (config.head_dim,)
        yield "k_norm.weight", (config.head_dim,)


def _mlp(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    if not config.is_moe(layer):
        yield from _swiglu("", hidden, config.intermediate_size, config.mlp_bias)
        return
    yield "gate.weight", (config.num_experts, hidden)
    for expert in range(config.num_experts):
        yield from _swiglu(f"experts.{expert}.", hidden, config.expert_ffn_size)
    if config.shared_expert_ffn_size:
        yield from _swiglu("shared_expert.", hidden, config.shared_expert_ffn_size)
        yield "shared_expert_gate.weight", (1, hidden)


def _swiglu(prefix: str, hidden: int, inner: int, bias: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, out, width in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield f"{prefix}{name}_proj.weight", (out, width)
        if bias:
            yield f"{prefix}{name}_proj.bias", (out,)
