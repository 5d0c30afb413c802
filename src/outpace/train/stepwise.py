"""Heads that guess step by step, eagle3 and mtp: a draft's rows in the order of run time, from every anchor at once.

Neighbours: eagle3.py and mtp.py say how feature and token enter; module.py has the layers. Source: the training-time
test of EAGLE-3 (arXiv 2503.01840): the head drafts several steps from every anchor, as it will at run time, and every
step learns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..heads.config import HeadConfig
from ..models.names import FINAL_NORM
from ..types import F32
from .batches import Batch
from .module import HeadModule, Tensor, attend, rms, unseen
from .torch_or_say import torch


class StepwiseHead(HeadModule):
    """A head whose step j pairs the token after position s + j with the head's own state of step j - 1 (the target's
    feature for j = 0)."""

    def __init__(
        self, config: HeadConfig, weights: Mapping[str, F32], embedding: F32, recorded: Sequence[int] | None = None
    ) -> None:
        super().__init__(config, weights, embedding, recorded)
        self.embedding = rms(self.embedding, config.layers.rms_norm_eps)  # nothing else is read of it, many times

    def fuse(self, states: Tensor) -> Tensor:
        """The target's tapped states float16 [..., taps, T] as features float32 [..., H]."""
        raise NotImplementedError

    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Slots of tokens [...] with features [..., H]: the first layer's residual [..., H], and what its attention
        reads where that is not the residual through the layer's own norm."""
        raise NotImplementedError

    def steps(self, batch: Batch, count: int) -> Iterator[Tensor]:
        """As HeadModule.steps; a draft sees the target's features up to its anchor, and its own steps."""
        self._begin()
        device = self.embedding.device
        tokens = torch.from_numpy(batch.tokens).to(device)
        size, longest = tokens.shape
        slots = torch.arange(longest, device=device)
        anchors = torch.from_numpy(batch.answers).to(device)[:, None] - 1 + torch.arange(batch.anchors, device=device)
        inside = anchors.clamp(max=longest - 1)
        sequence = torch.arange(size, device=device)[:, None]
        depth = self.config.layers.num_hidden_layers

        # What the target left behind: every slot through all layers but the last, where only the anchors go on.
        following = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
        x, attends = self.enter(following, self.fuse(self.states(batch)))
        context: list[tuple[Tensor, Tensor]] = []
        for layer in range(depth):
            normed = self._attended(layer, x, attends)
            context.append(self._context(layer, normed, slots))
            place = slots.expand(size, -1)
            if layer == depth - 1:
                x, normed, place = x[sequence, inside], normed[sequence, inside], inside
            (query,) = self._heads(layer, "q", normed)
            x = self._layer(layer, x, self._turn(query, place), context[-1], unseen(place, longest), [])
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(depth)]  # of each layer: keys, values by step
        mask = unseen(inside, longest)
        final = self._norm(x, FINAL_NORM)
        yield final
        for j in range(1, count):
            at = (anchors + 1 + j).clamp(max=longest - 1)
            x, attends = self.enter(tokens[sequence, at], final if self.config.norm_output else x)
            place = (anchors + j).clamp(max=len(self.cos) - 1)
            for layer in range(depth):
                normed = self._attended(layer, x, attends)
                query, key, value = self._heads(layer, "qkv", normed)
                own[layer].append((self._turn(key, place).to(value.dtype), value))
                x = self._layer(layer, x, self._turn(query, place), context[layer], mask, own[layer])
            final = self._norm(x, FINAL_NORM)
            yield final

    def _attended(self, layer: int, x: Tensor, attends: Tensor | None) -> Tensor:
        if layer or attends is None:
            return self._norm(x, f"model.layers.{layer}.input_layernorm.weight")
        return attends

    def _layer(
        self,
        layer: int,
        x: Tensor,
        query: Tensor,
        context: tuple[Tensor, Tensor],
        mask: Tensor,
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Rows x [B, n, H] with queries [B, n, N, D] through a layer; they see the context as the mask lets
        them, and their draft's own rows."""
        mine = [torch.stack(parts, 2) for parts in zip(*own, strict=True)]
        mixed = attend(query[:, :, None].to(context[1].dtype), *context, mask, mine)
        return self._after_attention(layer, x, mixed[:, :, 0])
