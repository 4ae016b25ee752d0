"""Batches of segment pairs, packed without padding."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalight.errors import DataError
from megalight.types import PackedSequences

IGNORED = -100
"""Label of positions and samples without loss, as in ``torch.nn.functional.cross_entropy``."""


@dataclass(frozen=True, eq=False)
class BertBatch:
    """Samples laid end to end.

    Attributes:
        tokens: ``[T]`` int64 inputs, some of them masked.
        token_types: ``[T]`` int64: 0 in the first segment of a sample, 1 in the second.
        labels: ``[T]`` int64: the original token at masked positions, -100 elsewhere.
        order: ``[B]`` int64: 0 if the segments are in the order of the text, 1 if they are swapped, -100 if the sample
            has no order loss.
        lengths: number of tokens of each sample, on the host. They sum to ``T``.
        rows: ``[M]`` int64: positions of the masked tokens, so that a model can skip all others. None: unknown.
        row_counts: number of masked tokens of each sample, on the host; empty if unknown.
        share: set by :meth:`context_share`: how the tokens of this context-parallel share divide into samples. None:
            the batch holds whole samples.
    """

    tokens: Tensor
    token_types: Tensor
    labels: Tensor
    order: Tensor
    lengths: tuple[int, ...]
    rows: Tensor | None = None
    row_counts: tuple[int, ...] = ()
    share: PackedSequences | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sequences(self) -> PackedSequences:
        """How the tokens divide into samples; on the device of the tokens."""
        return self.share or PackedSequences.of_lengths(self.lengths, self.tokens.device)

    def with_rows(self) -> BertBatch:
        """Return the batch with ``rows`` and ``row_counts`` from the labels. On a GPU, this makes the host wait."""
        rows = (self.labels != IGNORED).nonzero().flatten()
        # No row at all: a model cannot choose among none, and then computes all of them.
        if not len(rows):
            return self
        # On the host, where the batch is made. `split` then needs no wait for the device.
        counts = tuple(int((part != IGNORED).sum()) for part in torch.split(self.labels, list(self.lengths)))
        return replace(self, rows=rows, row_counts=counts)

    def split(self, size: int) -> list[BertBatch]:
        """Split into micro-batches of ``size`` samples; the last may have fewer. The tensors are views, not copies.

        Raises:
            DataError: this batch is a context-parallel share.
        """
        if self.share is not None:
            raise DataError(
                "a context-parallel share cannot be split into micro-batches; split the whole batch first, then take "
                "the share of each micro-batch."
            )
        bounds = [0, *itertools.accumulate(self.lengths)]
        places = [0, *itertools.accumulate(self.row_counts)]
        firsts = range(0, len(self), size)
        parts = []
        for first in firsts:
            last = min(first + size, len(self))
            text = slice(bounds[first], bounds[last])
            counts = self.row_counts[first:last]
            rows = None
            if self.rows is not None and any(counts):
                # Rows count from the beginning of their own micro-batch.
                rows = self.rows[places[first] : places[last]] - bounds[first]
            parts.append(
                replace(
                    self,
                    tokens=self.tokens[text],
                    token_types=self.token_types[text],
                    labels=self.labels[text],
                    order=self.order[first:last],
                    lengths=self.lengths[first:last],
                    rows=rows,
                    row_counts=() if rows is None else counts,
                )
            )
        return parts

    def context_share(self, rank: int, size: int, multiple: int = 1) -> BertBatch:
        """Take the part of every sample that one context-parallel rank holds (:meth:`PackedSequences.zigzag`).

        Padding carries no loss. Share 0 has the first token of every sample, so it alone has the order loss. Samples
        with fewer tokens than ``2 * size`` chunks are padded.

        Args:
            multiple: the number of tokens of the share is a multiple of this.

        Raises:
            DataError: the batch is already a share.
        """
        if size == 1:
            return self
        share, index = self.sequences.zigzag(rank, size, multiple)
        padding, source = index < 0, index.clamp(min=0)
        return replace(
            self,
            tokens=self.tokens[source].masked_fill(padding, 0),
            token_types=self.token_types[source].masked_fill(padding, 0),
            labels=self.labels[source].masked_fill(padding, IGNORED),
            order=self.order if rank == 0 else torch.full_like(self.order, IGNORED),
            rows=None,  # to count them in this share, the host would have to wait for the device
            row_counts=(),
            share=share,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BertBatch:
        """Copy to ``device``. Copies from page-locked memory never make the host wait."""
        non_blocking = non_blocking or self.tokens.is_pinned()
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            token_types=self.token_types.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            order=self.order.to(device, non_blocking=non_blocking),
            rows=None if self.rows is None else self.rows.to(device, non_blocking=non_blocking),
            share=None if self.share is None else self.share.to(device, non_blocking),
        )

    def pin_memory(self) -> BertBatch:
        """Copy to page-locked host memory."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            token_types=self.token_types.pin_memory(),
            labels=self.labels.pin_memory(),
            order=self.order.pin_memory(),
            rows=None if self.rows is None else self.rows.pin_memory(),
            share=None if self.share is None else self.share.pin_memory(),
        )
