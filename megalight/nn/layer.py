"""The transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.nn.attention import LayerCache
from megalight.nn.norm import norm_and_sum
from megalight.nn.rotary import RotaryTable
from megalight.types import PackedSequences


class TransformerLayer(nn.Module):
    """Pre-norm residual layer: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``.

    Args:
        attention_norm: before attention.
        attention: mixes tokens.
        mlp_norm: before the MLP.
        mlp: mixes features.
        dropout: probability, on what each of the two adds.
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        sequences: PackedSequences,
        rotary: RotaryTable | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``[T, h] -> [T, h]``."""
        normed, hidden = norm_and_sum(self.attention_norm, hidden)
        attended = self.attention_dropout(self.attention(normed, sequences, rotary, cache))
        normed, hidden = norm_and_sum(self.mlp_norm, attended, hidden)
        added: Tensor = self.mlp_dropout(self.mlp(normed))
        return hidden + added
