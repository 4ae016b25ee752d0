"""The layer context: what all layers of a forward pass share, and the states that continue a sequence (KV cache)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megalight.nn.rotary import RotaryTable
from megalight.nn.side_losses import SideLosses, current
from megalight.types import PackedSequences


@dataclass(frozen=True, eq=False)
class LayerContext:
    """Data that every layer can read during the forward pass of one micro-batch. It is made once for all layers.

    It holds no tensor that requires a gradient: recompute passes it on unchanged, a region of several layers checks
    that all get the same object, and layers in a CUDA graph share one copy. Tensors that require a gradient are
    separate arguments: hidden states, and the memory of cross attention.

    Attributes:
        sequences: how the tokens divide into sequences.
        rotary: rotary tables by name. Each mixer names the table it reads; a model with several bases has several.
        divisions: other ways in which the same tokens divide into sequences, by name, such as the windows of a vision
            tower. An attention that names one stays inside of its parts.
        rows: ``[M]`` int64: the tokens whose hidden states are read after the last layer, which returns only these if
            it can (:attr:`~megalight.nn.TransformerLayer.narrows`). None: all tokens.
        side_losses: receives the losses of single layers. By default, the collector that is active now.
    """

    sequences: PackedSequences
    rotary: Mapping[str, RotaryTable] = field(default_factory=dict)
    divisions: Mapping[str, PackedSequences] = field(default_factory=dict, kw_only=True)
    rows: Tensor | None = field(default=None, kw_only=True)
    side_losses: SideLosses = field(default_factory=current)


# The states of layers: what they keep of earlier tokens, so that a sequence can be continued.
#
# A mixer makes its state in ``make_state(slots)``. It keeps one row per token (keys and values), or one entry per
# sequence (the last inputs of a convolution, a recurrent state). :class:`Slots` decides where these are stored.


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
