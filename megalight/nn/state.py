"""The states of layers: what they keep of earlier tokens, so that a sequence can be continued.

A mixer makes its state in ``make_state(slots)``. It keeps one row per token (keys and values), or one entry per
sequence (the last inputs of a convolution, a recurrent state). :class:`Slots` decides where these are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class TokenRows(Protocol):
    """One row for each token of each sequence, including all earlier tokens."""

    def append(self, rows: Tensor) -> Tensor:
        """Store the rows ``[T, ...]`` of new tokens; return those of all tokens, packed as in ``sequences.keys``."""
        ...


class SequenceRows(Protocol):
    """One entry for each sequence."""

    def read(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return ``[n, *shape]``, the entries of the sequences in this pass. New sequences have zeros.

        The first call allocates the entries, with the dtype of ``like``.
        """
        ...

    def write(self, entries: Tensor) -> None:
        """Store the entries ``[n, *shape]`` of the sequences in this pass."""
        ...


class Slots(Protocol):
    """Storage for sequences that later forward passes continue. It knows which sequences are in the current pass."""

    def per_token(self) -> TokenRows:
        """Make storage for one row per token. The first rows decide its shape and dtype."""
        ...

    def per_sequence(self) -> SequenceRows:
        """Make storage for one entry per sequence."""
        ...


@dataclass(frozen=True, eq=False)
class KeysAndValues:
    """The state of attention: keys and values of every token."""

    keys: TokenRows
    values: TokenRows

    @classmethod
    def of(cls, slots: Slots) -> KeysAndValues:
        """Make an empty state, without any token."""
        return cls(slots.per_token(), slots.per_token())

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``k, v [T, Hkv, D]`` of the new tokens; return those of all tokens."""
        # The new tokens' keys and values are stored before they are read: a token also sees itself.
        return self.keys.append(k), self.values.append(v)
