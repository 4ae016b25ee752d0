"""Attention between packed rows that context-parallel ranks hold in equal runs, wherever sequences begin and end.

Rows of images need no causal order, so a share need not be made of parts of every sequence. A rank exchanges its rows
of all heads for all rows of its heads. Attention then is the ordinary one, inside images or windows.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.nn import InnerAttention
from megalight.parallel.context.exchange import trade_heads, trade_tokens
from megalight.parallel.context.spec import ContextGroups
from megalight.types import PackedSequences


class RowAttention(nn.Module):
    """Attention of this rank's run of rows.

    Args:
        inner: attention for one device.
        name: name of the module, for messages.
        groups: the process groups.
        heads: number of query heads and key heads on this rank.

    Raises:
        LayoutError: the ranks do not divide the heads.
    """

    def __init__(self, inner: InnerAttention, name: str, groups: ContextGroups, heads: tuple[int, int]) -> None:
        super().__init__()
        self.inner, self.groups = inner, groups
        cp = groups.mesh.cp
        if heads[0] % cp:
            raise LayoutError(
                f"{name}: {heads[0]} heads on each rank cannot be divided over cp={cp}, which must divide them. Choose "
                "another context_parallel or tensor_parallel of the tower."
            )

    @property
    def dropout(self) -> float:
        """Probability to drop an attention weight in training."""
        return self.inner.dropout

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, state: None = None, sink: None = None
    ) -> Tensor:
        """``q, k, v [P / cp, H, D] -> [P / cp, H, D]``; ``sequences`` describe all ``P`` rows."""
        group = self.groups.all
        assert group is not None
        whole = trade_tokens(q, k, v, None, group)
        return trade_heads(self.inner(*whole, sequences, state, sink), None, len(q), group)
