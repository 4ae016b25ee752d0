"""The transformer layer that normalises what it hands on (https://arxiv.org/abs/1706.03762, BERT)."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.nn.norm import norm_and_sum
from megalight.types import PackedSequences


class PostNormLayer(nn.Module):
    """``x = norm(x + attention(x))``, then ``x = norm(x + mlp(x))``.

    Args:
        attention: mixes tokens.
        attention_norm: after it.
        mlp: mixes features.
        mlp_norm: after it.
        dropout: probability, on what attention and MLP add.
    """

    def __init__(
        self,
        attention: nn.Module,
        attention_norm: nn.Module,
        mlp: nn.Module,
        mlp_norm: nn.Module,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_dropout = nn.Dropout(dropout)
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_dropout = nn.Dropout(dropout)
        self.mlp_norm = mlp_norm

    def forward(self, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        """``[T, h] -> [T, h]``."""
        attended = self.attention_dropout(self.attention(hidden, sequences))
        hidden, _ = norm_and_sum(self.attention_norm, attended, hidden)
        return norm_and_sum(self.mlp_norm, self.mlp_dropout(self.mlp(hidden)), hidden)[0]
