"""What layers keep of earlier tokens, so that a sequence can be continued.

A mixer says in ``make_state(slots)`` what it keeps: rows for every token (keys and values), or an entry for every
sequence (the last inputs of a convolution, a recurrent state). Where these lie is the affair of :class:`Slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class TokenRows(Protocol):
    """One row for each token so far of each sequence."""

    def append(self, rows: Tensor) -> Tensor:
        """Store ``[T, ...]`` of the new tokens; returns those of all tokens, packed as ``sequences.keys`` describes."""
        ...


class SequenceRows(Protocol):
    """One entry for each sequence."""

    def read(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """``[n, *shape]``, the entries of the pass's sequences; 0 for those that begin.

        The first call makes them, of the type of ``like``.
        """
        ...

    def write(self, entries: Tensor) -> None:
        """Store ``[n, *shape]``."""
        ...


class Slots(Protocol):
    """Room for sequences that are continued in later forward passes. It knows which ones are in the present pass."""

    def per_token(self) -> TokenRows:
        """Room for a row per token; its shape and type are those of the first that come."""
        ...

    def per_sequence(self) -> SequenceRows:
        """Room for an entry per sequence."""
        ...


@dataclass(frozen=True, eq=False)
class KeysAndValues:
    """The state of attention."""

    keys: TokenRows
    values: TokenRows

    @classmethod
    def of(cls, slots: Slots) -> KeysAndValues:
        """Without any token yet."""
        return cls(slots.per_token(), slots.per_token())

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``k, v [T, Hkv, D]`` of the new tokens; returns those of all tokens."""
        return self.keys.append(k), self.values.append(v)
