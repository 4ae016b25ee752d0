"""Attention of a draft model, which in training guesses several tokens ahead at all places at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megalight.nn.context import LayerContext
from megalight.nn.latent_attention import LatentAttention
from megalight.nn.state import KeysAndValues
from megalight.ops.attention import attention
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

    In training a guess sees the real tokens up to its place, and the earlier guesses at its place. In generation
    guesses are tokens like others, and attention is causal.

    Args:
        scale: factor of the scores. None means ``1 / sqrt(D)``.
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: PackedSequences,
        state: Lineage | KeysAndValues | None = None,
    ) -> Tensor:
        """``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``. The state gets ``k`` and ``v``."""
        if isinstance(state, Lineage):
            state.append(k, v)
            return lineage_attention(q, state.keys, state.values, sequences, scale=self.scale)
        if state is not None:
            k, v = state.append(k, v)
        return attention(q, k, v, sequences, scale=self.scale)


class LineageLatentAttention(LatentAttention):
    """Latent attention of a draft model. In training its state is a :class:`Lineage` of keys and values."""

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, input_size] -> [T, h]``. ``memory`` is unused."""
        if not isinstance(state, Lineage):
            return super().forward(hidden, context, state)
        q, latent, key = self._latents(hidden, context)
        return self._project(self.inner(q, *self._keys_values(latent, key), context.sequences, state))
