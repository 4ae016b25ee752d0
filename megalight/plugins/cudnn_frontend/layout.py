"""How packed tokens become cuDNN's ragged batches, in few sizes.

cuDNN sees ``[batch, heads, length, features]``. Where sequences differ, it is told where each begins (its *offset*, in
elements from the first) and how long it is; the tensors themselves stay packed. A graph is made for a number of
sequences and a longest length, so both are rounded up: missing sequences are empty. So a run has few graphs.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.types import PackedSequences

STEPS = 4
"""Sizes between a power of two and the next. A size is rounded up by less than a quarter."""
SMALLEST = 64
"""Rows of a block of cuDNN: no size below is worth a graph of its own."""


class Layout(NamedTuple):
    """The sizes that a graph is made for.

    Attributes:
        batch: number of sequences.
        length: queries of each; if ``packed``, of the longest.
        keys: keys of each; if ``packed``, of the longest.
        tokens: queries of all; if ``packed``, at most.
        key_tokens: keys of all; if ``packed``, at most.
        packed: whether lengths differ, and offsets tell where sequences begin.
        aligned: whether queries are the last tokens of their keys' sequence, so that masks align bottom-right.
    """

    batch: int
    length: int
    keys: int
    tokens: int
    key_tokens: int
    packed: bool
    aligned: bool


def bucket(size: int) -> int:
    """Round a size up to one of ``STEPS`` for each power of two."""
    step = max(SMALLEST, (1 << (size - 1).bit_length()) // (2 * STEPS))
    return -(-size // step) * step


def layout_of(sequences: PackedSequences) -> Layout:
    """Return the sizes of the graph that serves these sequences."""
    keys = sequences.keys
    batch, length = sequences.uniform or (0, 0)
    if keys is None and length > 1:  # cuDNN's backward cannot serve single queries of single keys
        tokens = batch * length
        return Layout(batch, length, length, tokens, tokens, packed=False, aligned=False)
    own = keys or sequences
    return Layout(
        batch=1 << (len(sequences.lengths) - 1).bit_length(),
        length=bucket(sequences.max_length),
        keys=bucket(own.max_length),
        tokens=bucket(sequences.num_tokens),
        key_tokens=bucket(own.num_tokens),
        packed=True,
        aligned=keys is not None,
    )


class Offsets:
    """Where the sequences of a pack begin, on the device, in the sizes of a layout.

    Attributes:
        lengths: ``[batch]`` int32: tokens of each sequence; 0 for those that only fill the batch.
    """

    def __init__(self, sequences: PackedSequences, batch: int) -> None:
        missing = batch - len(sequences.lengths)
        self._starts = F.pad(sequences.cu_seqlens, (0, missing), value=sequences.num_tokens)
        self.lengths = self._starts.diff()
        self._of: dict[int, Tensor] = {}

    def of(self, row: int) -> Tensor:
        """``[batch + 1]`` int64: first elements of sequences, and the end, in a tensor with ``row`` per token."""
        if row not in self._of:
            self._of[row] = self._starts.long() * row
        return self._of[row]


_known: WeakKeyDictionary[PackedSequences, Offsets] = WeakKeyDictionary()
"""All layers of a model, and their backward passes, ask for the same sequences."""


def offsets_of(sequences: PackedSequences, batch: int) -> Offsets:
    """Return the offsets of a pack, computed once, without a copy from the host."""
    if sequences.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Offsets(sequences, batch)  # memory of a recorded graph holds no values until it runs
    if sequences not in _known:
        _known[sequences] = Offsets(sequences, batch)
    return _known[sequences]
