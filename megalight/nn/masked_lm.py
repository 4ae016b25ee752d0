"""From an encoder's hidden states to the tokens that were masked."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.nn.head import LMHead
from megalight.nn.linear import Linear
from megalight.nn.mlp import Activation


class MaskedLMHead(nn.Module):
    """``output_layer(norm(act(dense(x))))`` (BERT, https://arxiv.org/abs/1810.04805).

    Args:
        dense: ``h -> h``.
        act: between the two projections.
        lm: norm and projection to the vocabulary.
    """

    def __init__(self, dense: Linear, act: Activation, lm: LMHead) -> None:
        super().__init__()
        self.dense = dense
        self.act = act
        self.lm = lm

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """``[T, h]`` and labels ``[T]`` (negative: none) ``->`` losses ``[T]``; without labels, logits ``[T, V]``."""
        answer: Tensor = self.lm(self.act(self.dense(hidden)), labels)
        return answer
