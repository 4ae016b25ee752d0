"""Attention of a draft model in training, which guesses several tokens ahead at all places at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from megalight.ops.lineage_attention import lineage_attention
from megalight.types import PackedSequences


@dataclass(frozen=True, eq=False)
class Lineage:
    """Keys and values of the steps so far; the first ones are of real tokens."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add those of a step, ``[T, Hkv, D]``."""
        self.keys.append(k)
        self.values.append(v)


class LineageAttention(nn.Module):
    """The part of attention between the projections, in place of :class:`~megalight.nn.InnerAttention`.

    A guess sees the real tokens up to its place, and the earlier guesses at its place.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, state: Lineage) -> Tensor:
        """``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``. The state gets ``k`` and ``v``."""
        state.append(k, v)
        return lineage_attention(q, state.keys, state.values, sequences)
