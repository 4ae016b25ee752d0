"""The head, together with its loss."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from megalight.ops.cross_entropy import linear_cross_entropy


class Head(nn.Linear):
    """A linear layer to the vocabulary that also returns losses, without all logits in float32.

    Attributes:
        stands_for: the layer that a style of a plan replaces it as: heads that are split have losses of their own.
    """

    stands_for: ClassVar = nn.Linear

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits ``[..., V]``, or losses ``[T]`` of ``labels [T]`` from hidden states ``[T, h]``."""
        if labels is None:
            return super().forward(input)
        return linear_cross_entropy(input, self.weight, labels, bias=self.bias)
