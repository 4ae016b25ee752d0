"""The transformer layer with norms after its sums (post-norm, https://arxiv.org/abs/1706.03762, used by BERT)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megalight.nn.context import LayerContext
from megalight.nn.norm import norm_and_sum
from megalight.nn.state import Slots


class PostNormLayer(nn.Module):
    """``x = norm(x + attention(x))``, then ``x = norm(x + mlp(x))``.

    Args:
        attention: mixes tokens.
        attention_norm: norm after attention.
        mlp: mixes features.
        mlp_norm: norm after the MLP.
        dropout: dropout probability of the outputs of attention and MLP.
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

    def make_state(self, slots: Slots) -> Any:
        """Make the state of attention, which holds what it needs of earlier tokens."""
        return self.attention.make_state(slots)  # type: ignore[operator]

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, h] -> [T, h]``. Attention gets ``state`` and ``memory``."""
        attended = self.attention_dropout(self.attention(hidden, context, state, memory))
        # The sum is dropped: in post-norm the residual stream is the normed tensor.
        hidden, _ = norm_and_sum(self.attention_norm, attended, hidden)
        return norm_and_sum(self.mlp_norm, self.mlp_dropout(self.mlp(hidden)), hidden)[0]
