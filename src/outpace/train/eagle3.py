"""An EAGLE-3 head in PyTorch: the mathematics of heads/reference.py, for many sequences at once, with gradients.

Neighbours: loop.py trains it, export.py writes it, heads/config.py describes it. Source: EAGLE-3 (arXiv 2503.01840),
with its training-time test: the head drafts several steps from every anchor, as it will at run time, and every step
learns.
Shapes as in batches.py; H hidden size, N heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..heads.config import HeadConfig, head_tensors
from ..models.names import FINAL_NORM
from ..models.rotary import rotary_tables
from ..types import F32
from .batches import Batch
from .torch_or_say import torch

Tensor = torch.Tensor
_LAYER = "model.layers.0."


class EagleHead(torch.nn.Module):
    """The head that `config` describes: eagle3, one llama layer without biases, sharing the target's embedding.

    weights: float32 under the names of head_tensors. embedding: the target's, float32 [V, H], which is not trained.
    """

    def __init__(self, config: HeadConfig, weights: Mapping[str, F32], embedding: F32) -> None:
        super().__init__()
        self.config = config
        self.weights = torch.nn.ParameterDict(
            {_key(name): torch.nn.Parameter(torch.tensor(weights[name])) for name in head_tensors(config)}
        )
        self.embedding = torch.tensor(embedding)
        tables = rotary_tables(config.layers, np.arange(config.layers.max_position_embeddings))
        self.cos, self.sin = (torch.tensor(table) for table in tables)

    def arrays(self) -> dict[str, F32]:
        """The weights as they are now, by the names of head_tensors."""
        return {name: self._w(name).detach().float().numpy().copy() for name in head_tensors(self.config)}

    def steps(self, batch: Batch, count: int) -> Iterator[Tensor]:
        """The final hidden states [B, A, H] of step 0, 1, ... count - 1 of the drafts from every anchor.

        Step j pairs the token after position s + j with the head's own state of step j - 1 (the target's feature for
        j = 0) and sees the target's features up to the anchor s and its own steps: what lies before it at run time.
        Rows behind a sequence's end hold numbers without meaning.
        """
        layers = self.config.layers
        tokens = torch.from_numpy(batch.tokens)
        size, longest = tokens.shape
        anchors = torch.from_numpy(batch.answers)[:, None] - 1 + torch.arange(batch.anchors)
        inside = anchors.clamp(max=longest - 1)
        sequence = torch.arange(size)[:, None]

        hidden = self.fuse(torch.from_numpy(batch.states).float())
        following = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
        x = self._pair(following, hidden)
        keys = self._turn(self._heads("k", x), torch.arange(longest))  # [B, K, T, D]
        values = self._heads("v", x)
        visible = torch.arange(longest) <= anchors[:, :, None]  # [B, A, T]
        mask = torch.where(visible, 0.0, -torch.inf)[:, None]  # [B, 1, A, T]
        x, hidden = x[sequence, inside], hidden[sequence, inside]
        own: list[tuple[Tensor, Tensor]] = []  # keys and values of earlier steps, [B, K, A, D]
        for j in range(count):
            if j:
                at = (anchors + 1 + j).clamp(max=longest - 1)
                x = self._pair(tokens[sequence, at], hidden)
            place = (anchors + j).clamp(max=len(self.cos) - 1)
            if j:
                own.append((self._turn(self._heads("k", x), place), self._heads("v", x)))
            query = self._turn(self._heads("q", x), place)
            mixed = _attend(query, keys, values, mask, own)
            mixed = mixed.transpose(1, 2).reshape(size, -1, layers.q_proj_dim())
            residual = self._norm(hidden, "hidden_norm.weight") if self.config.norm_before_residual else hidden
            out = residual + self._linear(_LAYER + "self_attn.o_proj.weight", mixed)
            out = out + self._mlp(self._norm(out, _LAYER + "post_attention_layernorm.weight"))
            final = self._norm(out, FINAL_NORM)
            hidden = final if self.config.norm_output else out
            yield final

    def fuse(self, states: Tensor) -> Tensor:
        """The target's tapped states [..., taps, T] as features [..., H]."""
        if self.config.feature_norm == "each":
            gains = torch.stack([self._w(f"fc_norm.{i}.weight") for i in range(len(self.config.taps))])
            states = rms(states, self.config.layers.rms_norm_eps) * gains
        states = states.flatten(-2)
        if self.config.feature_norm == "whole":
            states = self._norm(states, "input_norm.weight")
        return self._linear("fc.weight", states).float()

    def _pair(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads of slots: normalised embedding and feature, [..., 2 H]."""
        embedding = self._norm(self.embedding[tokens], _LAYER + "input_layernorm.weight")
        return torch.cat([embedding, self._norm(hidden, "hidden_norm.weight")], -1)

    def _heads(self, part: str, x: Tensor) -> Tensor:
        """q, k or v of rows [B, n, 2 H] by head, [B, heads, n, D]."""
        out = self._linear(_LAYER + f"self_attn.{part}_proj.weight", x)
        return out.view(*out.shape[:-1], -1, self.config.layers.head_dim).transpose(1, 2)

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [B, heads, n, D] at positions [n] or [B, n]."""
        cos, sin = self.cos[positions], self.sin[positions]
        if positions.ndim == 2:
            cos, sin = cos[:, None], sin[:, None]
        low, high = x.float().chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = (self._linear(_LAYER + f"mlp.{part}_proj.weight", x) for part in ("gate", "up"))
        return self._linear(_LAYER + "mlp.down_proj.weight", torch.nn.functional.silu(gate) * up)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        out: Tensor = rms(x.float(), self.config.layers.rms_norm_eps) * self._w(name)
        return out

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.linear(x, self._w(name))
        return out

    def _w(self, name: str) -> Tensor:
        weight: Tensor = self.weights[_key(name)]
        return weight


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of queries [B, N, A, D] over the features' keys [B, K, T, D], where mask [B, 1, A, T] lets them, and
    over the one key that each earlier step, and this one, has for the same anchor."""
    share = query.shape[1] // keys.shape[1]
    size, heads, anchors, dim = query.shape
    rows = query.reshape(size, heads // share, share * anchors, dim)
    scores = (rows @ keys.transpose(-1, -2)).view(size, heads, anchors, -1).float() * dim**-0.5 + mask
    mixed: Tensor
    if not own:
        weights = scores.softmax(-1).to(values.dtype)
        mixed = (weights.view(size, heads // share, share * anchors, -1) @ values).view(query.shape)
        return mixed
    spread = [tuple(part.repeat_interleave(share, 1) for part in pair) for pair in own]
    mine = torch.stack([(query.float() * key.float()).sum(-1) for key, _ in spread], -1) * dim**-0.5
    weights = torch.cat([scores, mine], -1).softmax(-1).to(values.dtype)
    length = keys.shape[2]
    mixed = (weights[..., :length].reshape(size, heads // share, share * anchors, -1) @ values).view(query.shape)
    for i, (_, value) in enumerate(spread):
        mixed = mixed + weights[..., length + i, None] * value
    return mixed


def rms(x: Tensor, eps: float) -> Tensor:
    """x [..., H] over its root mean square."""
    out: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return out


def _key(name: str) -> str:
    """Parameters cannot have dots in their names."""
    return name.replace(".", "/")
