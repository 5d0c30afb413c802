"""What the heads of every kind share in PyTorch: weights by name, a decoder layer's parts, attention over a context.

Neighbours: stepwise.py (eagle3.py, mtp.py) and dflash.py build on it, kinds.py lists them, loop.py trains them. The
mathematics is that of heads/reference.py, for many sequences at once, with gradients.
Shapes as in batches.py; H hidden size, N heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..heads.config import HeadConfig, head_tensors
from ..models.names import HEAD
from ..models.rotary import rotary_tables
from ..types import F32, UsageError
from .batches import Batch
from .torch_or_say import torch

Tensor = torch.Tensor


class HeadModule(torch.nn.Module):
    """The head that `config` describes: dense layers that see the whole text, sharing the target's embedding.

    weights: float32 under the names of head_tensors. embedding: the target's, float32 [V, H], which is not trained.
    recorded: the taps of the data's states, where they are more than the head's own. Raises UsageError when the data
    lack one of the head's.
    """

    embedding: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: HeadConfig, weights: Mapping[str, F32], embedding: F32, recorded: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.config = config
        recorded = config.taps if recorded is None else recorded
        if missing := [tap for tap in config.taps if tap not in recorded]:
            raise UsageError(f"the data lack the output of layer {missing[0]}, which the head reads")
        self.columns = [list(recorded).index(tap) for tap in config.taps]
        self.weights = torch.nn.ParameterDict(
            {_key(name): torch.nn.Parameter(torch.tensor(weights[name])) for name in head_tensors(config)}
        )
        cos, sin = rotary_tables(config.layers, np.arange(config.layers.max_position_embeddings))
        for name, table in (("embedding", embedding), ("cos", cos), ("sin", sin)):
            self.register_buffer(name, torch.tensor(table), persistent=False)  # moves with the weights, is not saved
        self._ready: dict[tuple[str, ...], Tensor] = {}

    @property
    def rows(self) -> Tensor:
        """Output rows of its own [draft vocabulary, H]; only where `config` has them."""
        return self._w(HEAD)

    def steps(self, batch: Batch, count: int) -> Iterator[Tensor]:
        """The final hidden states [B, A, H] of guess 0, 1, ... count - 1 of the drafts from every anchor.

        A draft from anchor s sees of the target only what lies before it at run time: features up to s, tokens up to
        s + 1. Rows behind a sequence's end hold numbers without meaning.
        """
        raise NotImplementedError

    def arrays(self) -> dict[str, F32]:
        """The weights as they are now, by the names of head_tensors."""
        return {name: self._w(name).detach().float().numpy().copy() for name in head_tensors(self.config)}

    def states(self, batch: Batch) -> Tensor:
        """What the head's taps gave, float16 [B, T, taps, T's hidden size]."""
        states = torch.from_numpy(batch.states).to(self.embedding.device)
        return states if len(self.columns) == states.shape[2] else states[:, :, self.columns]

    def _context(self, layer: int, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T, D] of a layer for rows x [B, T, H] that attention reads, at places [T]."""
        key, value = self._heads(layer, "kv", x)
        key = self._turn(key, places).to(value.dtype)
        return key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()

    def _heads(self, layer: int, parts: str, x: Tensor) -> list[Tensor]:
        """Some of q, k and v ("qkv") of rows [..., H] by head, [..., heads, D], q and k normalised where layers do."""
        config = self.config.layers
        stem = f"model.layers.{layer}.self_attn."
        widths = [config.q_proj_dim() if part == "q" else config.kv_proj_dim() for part in parts]
        found = []
        joined = self._linear(x, *(f"{stem}{part}_proj" for part in parts))
        for part, out in zip(parts, torch.split(joined, widths, -1), strict=True):
            out = out.view(*out.shape[:-1], -1, config.head_dim)
            found.append(self._norm(out, f"{stem}{part}_norm.weight") if config.qk_norm and part != "v" else out)
        return found

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [..., heads, D] at positions [...] (its first axes may lack)."""
        cos, sin = self.cos[positions][..., None, :], self.sin[positions][..., None, :]
        low, high = x.float().chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def _after_attention(self, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output rows [..., H]: x, the residual, and what attention mixed [..., N, D]."""
        stem = f"model.layers.{layer}."
        x = x + self._linear(mixed.flatten(-2), stem + "self_attn.o_proj")
        normed = self._norm(x, stem + "post_attention_layernorm.weight")
        gate, up = self._linear(normed, stem + "mlp.gate_proj", stem + "mlp.up_proj").chunk(2, -1)
        return x + self._linear(torch.nn.functional.silu(gate) * up, stem + "mlp.down_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        out: Tensor = rms(x.float(), self.config.layers.rms_norm_eps) * self._w(name)
        return out

    def _linear(self, x: Tensor, *stems: str) -> Tensor:
        """x through the matrices of these names, their outputs side by side: one product instead of several."""
        if stems not in self._ready:
            weights = [self._w(stem + ".weight") for stem in stems]
            whole = torch.cat(weights) if stems[1:] else weights[0]
            device = whole.device.type
            self._ready[stems] = (
                whole.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else whole
            )
        biases = [self._w(stem + ".bias") for stem in stems if _key(stem + ".bias") in self.weights]
        bias = torch.cat(biases) if biases else None
        out: Tensor = torch.nn.functional.linear(x, self._ready[stems], bias)
        return out

    def _begin(self) -> None:
        """Forgets the matrices that were put side by side: they have changed since the steps before."""
        self._ready.clear()

    def _w(self, name: str) -> Tensor:
        weight: Tensor = self.weights[_key(name)]
        return weight


def unseen(last: Tensor, slots: int) -> Tensor:
    """A mask for `attend`, [B, 1, A, 1, T]: drafts see the slots of a context of T up to last [B, A]."""
    return torch.where(torch.arange(slots, device=last.device) > last[:, :, None], -torch.inf, 0.0)[:, None, :, None]


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own: Sequence[Tensor] = ()) -> Tensor:
    """Attention of the rows of A drafts, M rows each, over a context of T slots and over P rows of the same draft.

    query: [B, A, M, N, D]. keys, values: [B, K, T, D]. mask: as `unseen` makes it. own: keys and values
    [B, A, P, K, D] that every row of their draft sees, or nothing. Returns [B, A, M, N, D].
    """
    size, anchors, rows, heads, dim = query.shape
    groups, slots = keys.shape[1:3]
    share = heads // groups
    # The rows that share keys lie side by side.
    q = (query * dim**-0.5).reshape(size, anchors, rows, groups, share, dim).permute(0, 3, 1, 2, 4, 5)
    q = q.reshape(size, groups, anchors, rows * share, dim).contiguous()
    scores = (q.view(size, groups, -1, dim) @ keys.transpose(-1, -2)).float()
    scores = scores.view(size, groups, anchors, -1, slots).add_(mask)
    if own:
        own_keys, own_values = (part.permute(0, 3, 1, 2, 4).contiguous() for part in own)  # [B, K, A, P, D]
        scores = torch.cat([scores, (q @ own_keys.transpose(-1, -2)).float()], -1)
    weights = scores.softmax(-1).to(q.dtype)
    mixed = weights[..., :slots].reshape(size, groups, -1, slots) @ values
    if own:
        mixed = mixed + (weights[..., slots:] @ own_values).view(mixed.shape)
    out: Tensor = mixed.view(size, groups, anchors, rows, share, dim).permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    return out


def rms(x: Tensor, eps: float) -> Tensor:
    """x [..., H] over its root mean square."""
    out: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return out


def _key(name: str) -> str:
    """Parameters cannot have dots in their names."""
    return name.replace(".", "/")
