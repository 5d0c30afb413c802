"""A multi-token-prediction head in PyTorch (DeepSeek-V3, arXiv 2412.19437): embedding and feature become one row.

Neighbours: stepwise.py has the steps, heads/config.py describes the head, target.py its first weights.
"""

from __future__ import annotations

from .module import Tensor
from .stepwise import StepwiseHead
from .torch_or_say import torch


class MtpHead(StepwiseHead):
    """mtp: one layer of the target's own architecture, which reads the target's last hidden state."""

    def fuse(self, states: Tensor) -> Tensor:
        """As StepwiseHead.fuse: the one tap is the feature."""
        return states.flatten(-2).float()

    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, None]:
        """As StepwiseHead.enter."""
        embedding = self.embedding[tokens] * self._w("embedding_norm.weight")
        pair = [embedding, self._norm(hidden, "hidden_norm.weight")]
        if self.config.concat == "hidden_first":
            pair.reverse()
        return self._linear(torch.cat(pair, -1), "fc").float(), None
