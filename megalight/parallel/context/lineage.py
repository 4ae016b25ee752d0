"""Attention of a draft model under context parallelism.

The real tokens that a guess sees lie in all shares: their keys and values are gathered once, in the first step. Earlier
guesses at a place are on the rank that holds the place, so later steps need no message
(:mod:`megalight.ops.lineage_attention`).
"""

from __future__ import annotations

from torch import Tensor, nn

from megalight.nn import Lineage, LineageAttention
from megalight.parallel.context.gather import chunks_of, seen
from megalight.parallel.context.spec import ContextGroups
from megalight.types import PackedSequences


class ContextLineageAttention(nn.Module):
    """Attention of this rank's places to the real tokens of all shares, and to the guesses at these places.

    Args:
        inner: attention for one device.
        groups: the process groups.
    """

    def __init__(self, inner: LineageAttention, groups: ContextGroups) -> None:
        super().__init__()
        self.inner = inner
        self.groups = groups

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, state: Lineage | None = None
    ) -> Tensor:
        """``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``. The state gets the keys and values that are seen."""
        if sequences.context is None:
            out: Tensor = self.inner(q, k, v, sequences, state)
            return out
        if state is None or not state.keys:
            sequences, k, v = seen(k, v, sequences, self.groups)
        else:
            sequences, _ = chunks_of(sequences)
        shared: Tensor = self.inner(q, k, v, sequences, state)
        return shared
