"""An EAGLE-3 head in PyTorch (arXiv 2503.01840): how features are fused, and how they enter beside the token.

Neighbours: stepwise.py has the steps, heads/config.py describes the head, target.py its first weights.
"""

from __future__ import annotations

from .module import Tensor, rms
from .stepwise import StepwiseHead
from .torch_or_say import torch


class EagleHead(StepwiseHead):
    """eagle3: the first layer's attention reads embedding and feature side by side, its residual is the feature."""

    def fuse(self, states: Tensor) -> Tensor:
        """As StepwiseHead.fuse."""
        eps, weight = self.config.layers.rms_norm_eps, self._w("fc.weight")
        if self.config.feature_norm == "whole":
            features, names = rms(states.flatten(-2).float(), eps), ["input_norm.weight"]
        elif self.config.feature_norm == "each":
            features = rms(states.float(), eps).flatten(-2)
            names = [f"fc_norm.{i}.weight" for i in range(len(self.config.taps))]
        else:
            features, names = states.flatten(-2).float(), []
        if names:  # gains times matrix: cheaper than gains times features
            weight = weight * torch.cat([self._w(name) for name in names])
        return torch.nn.functional.linear(features, weight).float()

    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As StepwiseHead.enter."""
        embedding = self.embedding[tokens] * self._w("model.layers.0.input_layernorm.weight")
        normed = self._norm(hidden, "hidden_norm.weight")
        return normed if self.config.norm_before_residual else hidden, torch.cat([embedding, normed], -1)
