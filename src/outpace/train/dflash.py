"""A DFlash head in PyTorch (arXiv 2602.06036): a draft is a block, guessed at once.

Neighbours: module.py has the layers, heads/config.py describes the head, target.py its first weights. The context is
the target's fused features, the same in every layer; a block's rows are the anchor's token, the newest one, and mask
tokens. They see the features up to the anchor and each other, both ways, so that a block is always computed whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..models.names import FINAL_NORM
from ..types import UsageError
from .batches import Batch
from .module import HeadModule, Tensor, attend, unseen
from .torch_or_say import torch


class BlockHead(HeadModule):
    """dflash without Markov and confidence heads, whose layers see the whole text."""

    @property
    def guesses(self) -> int:
        """Of a block."""
        return self.config.block_size - (not self.config.sample_from_anchor)

    def steps(self, batch: Batch, count: int) -> Iterator[Tensor]:
        """As HeadModule.steps. Raises UsageError for more guesses than a block has."""
        config = self.config
        if count > self.guesses:
            raise UsageError(f"a block of this head has {self.guesses} guesses, not {count}")
        self._begin()
        device = self.embedding.device
        tokens = torch.from_numpy(batch.tokens).to(device)
        size, longest = tokens.shape
        anchors = torch.from_numpy(batch.answers).to(device)[:, None] - 1 + torch.arange(batch.anchors, device=device)
        inside = anchors.clamp(max=longest - 1)
        rows = torch.arange(config.block_size, device=device)
        place = (anchors[:, :, None] + 1 + rows).clamp(max=len(self.cos) - 1)  # [B, A, M]

        fused = torch.nn.functional.linear(self.states(batch).flatten(-2).float(), self._w("fc.weight"))
        features = self._norm(fused, "hidden_norm.weight")
        newest = tokens[torch.arange(size, device=device)[:, None], (anchors + 1).clamp(max=longest - 1)]
        block = torch.where(rows == 0, newest[:, :, None], config.mask_token)
        x = self.embedding[block]  # [B, A, M, H]
        slots, mask = torch.arange(longest, device=device), unseen(inside, longest)
        for layer in range(config.layers.num_hidden_layers):
            keys, values = self._context(layer, features, slots)
            normed = self._norm(x, f"model.layers.{layer}.input_layernorm.weight")
            query, key, value = self._heads(layer, "qkv", normed)
            query, key = (self._turn(part, place).to(values.dtype) for part in (query, key))
            x = self._after_attention(layer, x, attend(query, keys, values, mask, (key, value)))
        final = self._norm(x, FINAL_NORM)
        skip = config.block_size - self.guesses
        for j in range(count):
            yield final[:, :, skip + j]
