"""One description of a learned draft head, whatever file it comes from, and the tensors that it demands.

Neighbours: loading.py makes these from files; reference.py and the native core compute by them. A head's decoder layers
are described by the project's ModelConfig and carry the names of models/names.py, so that what runs a model's layer
runs a head's. Algorithms: mtp (DeepSeek-V3, arXiv 2412.19437), eagle3 (EAGLE-3, arXiv 2503.01840), dflash (DFlash,
arXiv 2602.06036, with DSpark's Markov and confidence heads as options). docs/heads.md tells where each fact is from.

Own tensors beside the layers', [out, in]; H is the head's hidden size, T the target's, V the target's vocabulary, D the
draft vocabulary, R the Markov rank:

    fc.weight              [H, taps * T] the tapped features become one; mtp: [H, 2 H], embedding and feature
    input_norm.weight      [taps * T]    eagle3, feature_norm "whole"
    fc_norm.i.weight       [T]           eagle3, feature_norm "each"
    hidden_norm.weight     [H]           norm of the feature: eagle3 in its first layer, mtp before fc, dflash after fc
    embedding_norm.weight  [H]           mtp; eagle3's is its first layer's input_layernorm
    model.norm.weight      [H]           before the head's logits
    model.embed_tokens.weight [V, H], lm_head.weight [D, H]   where the head has its own; else the target's
    markov_w1.weight [V, R], markov_w2.weight [D, R]; markov_gate.{weight [R, H + R], bias}; markov_joint.{weight
    [3 R, 2 R + H], bias}; confidence.{weight [1, H (+ R)], bias [1]}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import ModelConfig
from ..config_fields import check_int, show
from ..models.names import EMBEDDING, HEAD, expected_tensors
from ..types import ModelError

Algorithm = Literal["mtp", "eagle3", "dflash"]
FeatureNorm = Literal["none", "whole", "each"]
Concat = Literal["embedding_first", "hidden_first"]
Markov = Literal["none", "vanilla", "gated", "rnn"]
Confidence = Literal["none", "hidden", "hidden_markov"]

MAX_BLOCK = 256
MAX_TAPS = 64
_CHOICES = {
    "algorithm": ("mtp", "eagle3", "dflash"),
    "feature_norm": ("none", "whole", "each"),
    "concat": ("embedding_first", "hidden_first"),
    "markov": ("none", "vanilla", "gated", "rnn"),
    "confidence": ("none", "hidden", "hidden_markov"),
}
_FLAGS = ("norm_output", "norm_before_residual", "sample_from_anchor", "sliding_window_non_causal")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head. Raises ModelError, naming field and value, when made with impossible values.

    layers: its decoder layers; vocab_size is the target's. taps: the target's hidden states that it reads, as
    backends/base.py counts them (-1 embedding, i output of layer i, target_layers after the final norm), concatenated
    in this order. norm_output: mtp and eagle3 feed their own hidden state back after the final norm, else before.
    """

    algorithm: Algorithm
    layers: ModelConfig
    target_layers: int
    target_hidden_size: int
    taps: tuple[int, ...]
    draft_vocab_size: int
    own_embedding: bool = False
    own_lm_head: bool = False
    norm_output: bool = False  # mtp, eagle3
    norm_before_residual: bool = False  # eagle3: the first residual is the normalised feature
    feature_norm: FeatureNorm = "none"  # eagle3: RMSNorm before fc, none, over all taps, or of each tap
    concat: Concat = "embedding_first"  # mtp: what fc reads first
    block_size: int = 0  # dflash: rows of a block, the anchor being the first
    mask_token: int = 0  # dflash: the token of the other rows
    sample_from_anchor: bool = False  # dflash: row i guesses token i + 1 of the block, else row i guesses token i
    sliding_window_non_causal: bool = False  # dflash: rows of a block see each other both ways in sliding layers too
    markov: Markov = "none"  # dflash: the bias by the token before
    markov_rank: int = 0
    confidence: Confidence = "none"  # dflash: what its estimate of being accepted reads

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ModelError(f"{name} must be one of {', '.join(allowed)}, got {show(getattr(self, name))}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ModelError(f"{name} must be true or false, got {show(getattr(self, name))}")
        check_int("target_layers", self.target_layers, 1, 1024)
        check_int("target_hidden_size", self.target_hidden_size, 1, 2**18)
        check_int("draft_vocab_size", self.draft_vocab_size, 1, self.layers.vocab_size)
        if not 1 <= len(self.taps) <= MAX_TAPS:
            raise ModelError(f"a head must tap 1 to {MAX_TAPS} hidden states of its target, got {len(self.taps)}")
        for tap in self.taps:
            check_int(f"tap (of a target with {self.target_layers} layers)", tap, -1, self.target_layers)
        if len(set(self.taps)) != len(self.taps):
            raise ModelError(f"taps must differ, got {show(self.taps)}")
        if self.algorithm == "mtp" and (len(self.taps) != 1 or self.target_hidden_size != self.layers.hidden_size):
            raise ModelError("an mtp head reads one hidden state, of its own width")
        if self.algorithm == "dflash":
            check_int("block_size", self.block_size, 1 if self.sample_from_anchor else 2, MAX_BLOCK)
            check_int("mask_token_id", self.mask_token, 0, self.layers.vocab_size - 1)
        check_int("markov_rank", self.markov_rank, 1 if self.markov != "none" else 0, 2**16)
        if self.confidence == "hidden_markov" and self.markov == "none":
            raise ModelError("the confidence head reads the Markov embedding, but the head has no Markov head")

    @property
    def feature_width(self) -> int:
        """Width of what `taps` give, concatenated."""
        return len(self.taps) * self.target_hidden_size


def head_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """name -> shape of every tensor of the head, d2t excepted."""
    layers, hidden, rank = config.layers, config.layers.hidden_size, config.markov_rank
    tensors = {name: shape for name, shape in expected_tensors(layers).items() if name not in (EMBEDDING, HEAD)}
    tensors["hidden_norm.weight"] = (hidden,)
    if config.algorithm == "mtp":
        tensors["embedding_norm.weight"] = (hidden,)
        tensors["fc.weight"] = (hidden, 2 * hidden)
    else:
        tensors["fc.weight"] = (hidden, config.feature_width)
    if config.algorithm == "eagle3":
        for part in "qkv":  # the first layer reads embedding and feature
            name = f"model.layers.0.self_attn.{part}_proj.weight"
            tensors[name] = (tensors[name][0], 2 * hidden)
    if config.feature_norm == "whole":
        tensors["input_norm.weight"] = (config.feature_width,)
    elif config.feature_norm == "each":
        tensors |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(len(config.taps))}
    if config.own_embedding:
        tensors[EMBEDDING] = (layers.vocab_size, hidden)
    if config.own_lm_head:
        tensors[HEAD] = (config.draft_vocab_size, hidden)
    if config.markov != "none":
        tensors["markov_w1.weight"] = (layers.vocab_size, rank)
        tensors["markov_w2.weight"] = (config.draft_vocab_size, rank)
    if config.markov == "gated":
        tensors |= {"markov_gate.weight": (rank, hidden + rank), "markov_gate.bias": (rank,)}
    elif config.markov == "rnn":
        tensors |= {"markov_joint.weight": (3 * rank, 2 * rank + hidden), "markov_joint.bias": (3 * rank,)}
    if config.confidence != "none":
        width = hidden + (rank if config.confidence == "hidden_markov" else 0)
        tensors |= {"confidence.weight": (1, width), "confidence.bias": (1,)}
    return tensors
