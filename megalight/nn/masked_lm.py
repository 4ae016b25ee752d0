"""The head of masked language models: predicts the masked tokens from an encoder's hidden states."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.nn.head import LMHead
from megalight.nn.linear import Linear
from megalight.nn.mlp import Activation


class MaskedLMHead(nn.Module):
    """``output_layer(norm(act(dense(x))))`` (BERT, https://arxiv.org/abs/1810.04805).

    Args:
        dense: ``h -> h``.
        act: activation after ``dense``.
        lm: norm and projection to the vocabulary.
    """

    def __init__(self, dense: Linear, act: Activation, lm: LMHead) -> None:
        super().__init__()
        self.dense = dense
        self.act = act
        self.lm = lm

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """``[T, h]`` and labels ``[T]`` (negative: no loss) to losses ``[T]``; without labels, to logits ``[T, V]``."""
        answer: Tensor = self.lm(self.act(self.dense(hidden)), labels)
        return answer
