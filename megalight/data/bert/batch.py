"""Batches of segment pairs, packed: no row is padded to the length of another."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalight.errors import DataError
from megalight.types import PackedSequences

IGNORED = -100
"""Label of what carries no loss."""


@dataclass(frozen=True, eq=False)
class BertBatch:
    """Samples end to end.

    Attributes:
        tokens: ``[T]`` int64 inputs, some of them masked.
        token_types: ``[T]`` int64: 0 in the first segment of a sample, 1 in the second.
        labels: ``[T]`` int64: the token that belongs in a masked place, -100 elsewhere.
        order: ``[B]`` int64: 0 where the segments are in the order of the text, 1 where they are swapped, -100 where
            nobody asks.
        lengths: tokens of each sample, on the host; they sum to ``T``.
        rows: ``[M]`` int64: places of the masked tokens, so that a model need not look at others. None: not known.
        row_counts: how many of them each sample has, on the host; empty where they are not known.
        weight: samples per sample of an average micro-batch: what the mean of this batch's samples must be multiplied
            by, so that the mean over micro-batches is the mean over samples. :meth:`split` sets it.
        share: how the tokens divide, where they are a share of cut samples (:meth:`context_share`); None otherwise.
    """

    tokens: Tensor
    token_types: Tensor
    labels: Tensor
    order: Tensor
    lengths: tuple[int, ...]
    rows: Tensor | None = None
    row_counts: tuple[int, ...] = ()
    weight: float = 1.0
    share: PackedSequences | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sequences(self) -> PackedSequences:
        """How the tokens divide into samples, on their device."""
        return self.share or PackedSequences.of_lengths(self.lengths, self.tokens.device)

    def with_rows(self) -> BertBatch:
        """The same, with ``rows`` as the labels say. On a device the host waits for it: for batches in the making."""
        rows = (self.labels != IGNORED).nonzero().flatten()
        if not len(rows):
            return self
        counts = tuple(int((part != IGNORED).sum()) for part in torch.split(self.labels, list(self.lengths)))
        return replace(self, rows=rows, row_counts=counts)

    def split(self, size: int) -> list[BertBatch]:
        """Micro-batches of ``size`` samples (the last may be smaller): views, no copy.

        Raises:
            DataError: this is a share of cut samples.
        """
        if self.share is not None:
            raise DataError("a share of cut samples cannot be split; take micro-batches first, then their shares.")
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
                    weight=self.weight * len(firsts) * (last - first) / len(self),
                )
            )
        return parts

    def context_share(self, rank: int, size: int, multiple: int = 1) -> BertBatch:
        """Share ``rank`` of ``size`` of every sample, by :meth:`PackedSequences.zigzag`; its padding has no loss.

        The first share has the first token of every sample, and alone answers for the order of segments: for all.
        Samples of fewer tokens than there are chunks are padded, even where all are so short.

        Args:
            rank: which share.
            size: how many shares.
            multiple: the share's token count is a multiple of this.

        Raises:
            DataError: the batch is a share already.
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
            weight=self.weight * size,
            share=share,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BertBatch:
        """A copy on ``device``. From page-locked memory the host never waits for it."""
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
        """A copy in page-locked host memory."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            token_types=self.token_types.pin_memory(),
            labels=self.labels.pin_memory(),
            order=self.order.pin_memory(),
            rows=None if self.rows is None else self.rows.pin_memory(),
            share=None if self.share is None else self.share.pin_memory(),
        )
