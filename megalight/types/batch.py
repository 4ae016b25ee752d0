"""Rows of tokens with labels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from megalight.errors import DataError
from megalight.types.base_states import BaseStates
from megalight.types.packed import PackedSequences
from megalight.types.top_tokens import TopTokens
from megalight.types.zigzag import check_length


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Rows of tokens with their labels: what data sets of language models yield and their training steps take.

    Attributes:
        tokens: ``[B, S]`` int64 inputs.
        labels: ``[B, S]`` int64: the token that follows each input.
        loss_mask: ``[B, S]`` float32: 1 where the label counts in the loss, 0 elsewhere.
        document_lengths: for each row, the lengths of its documents, which sum to ``S``. Attention then stays inside
            documents, and positions restart at each. None: a row is one sequence.
        share: set by :meth:`context_share`: how the tokens of this context-parallel share divide into sequences.
            None: the batch holds whole sequences.
        later: set by :meth:`context_share`: the shares of :meth:`shifted` by 1, 2 and so on.
        axis_positions: ``[B, A, S]`` int64: the position of each token on several axes, such as time, height and width
            (:meth:`PackedSequences.with_axes`). None: tokens have one position. A share keeps them in ``share``.
        places: set by :meth:`context_share`: ``[T]``, the place of each token of the share among the tokens of the
            whole batch, laid end to end. That of padding is 0.
        taught: ``[B, S]``: what a teacher predicts after each token, or what a base makes of it, from a store. None:
            there is no store.
        rows: ``[M]`` int64: which of all tokens, laid end to end, count in the loss, so that a model can skip others
            behind its last mixer; see :meth:`with_rows`. None: unknown, or all or none do. A share has none.
        row_counts: how many each sample has, on the host; empty if unknown.
        columns: name -> ``[B, S]``: what else is known of each label, such as its reward. A share has 0 for padding.

    Who lets more tokens count, by another loss mask, leaves out ``rows`` and ``row_counts``.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    document_lengths: tuple[tuple[int, ...], ...] | None = None
    share: PackedSequences | None = None
    later: tuple[TokenBatch, ...] = ()
    axis_positions: Tensor | None = field(default=None, kw_only=True)
    places: Tensor | None = field(default=None, kw_only=True)
    taught: TopTokens | BaseStates | None = field(default=None, kw_only=True)
    rows: Tensor | None = field(default=None, kw_only=True)
    row_counts: tuple[int, ...] = field(default=(), kw_only=True)
    columns: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequences(self) -> PackedSequences:
        """How the tokens, laid end to end, divide into sequences; on the device of the tokens.

        Raises:
            DataError: the document lengths of a row do not sum to its length.
        """
        # A share knows its sequences; rows and documents no longer say anything about them.
        if self.share is not None:
            return self.share
        batch, length = self.tokens.shape
        if self.axis_positions is not None:
            rows = replace(self, axis_positions=None).sequences
            return rows.with_axes(self.axis_positions.transpose(0, 1).flatten(1))
        if self.document_lengths is None:
            return PackedSequences.of_uniform(batch, length, self.tokens.device)
        # Checked when it is used: a wrong sum would shift all documents behind it.
        if [sum(row) for row in self.document_lengths] != [length] * batch:
            raise DataError(
                f"the document lengths of the rows sum to {[sum(row) for row in self.document_lengths][:8]}, but the "
                f"batch has {batch} rows of {length} tokens. The document lengths of each row must sum to its length."
            )
        return PackedSequences.of_lengths([n for row in self.document_lengths for n in row], self.tokens.device)

    def with_rows(self) -> Self:
        """Return the batch with ``rows`` and ``row_counts`` from the loss mask. On a GPU, this makes the host wait."""
        counted = self.loss_mask != 0
        rows = counted.flatten().nonzero().flatten()
        if len(rows) in (0, counted.numel()):
            return replace(self, rows=None, row_counts=())
        return replace(self, rows=rows, row_counts=tuple(counted.sum(1).tolist()))

    def split(self, size: int) -> list[TokenBatch]:
        """Split into micro-batches of ``size`` rows; the last may have fewer. The tensors are views, not copies.

        Raises:
            DataError: this batch is a context-parallel share.
        """
        if self.share is not None:
            raise DataError(
                "a context-parallel share cannot be split into micro-batches; split the whole batch first, then take "
                "the share of each micro-batch."
            )
        parts = [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]
        documents, axes = self.document_lengths, self.axis_positions
        return [
            self._with_rows_of(
                part,
                TokenBatch(
                    self.tokens[part],
                    self.labels[part],
                    self.loss_mask[part],
                    None if documents is None else documents[part],
                    axis_positions=None if axes is None else axes[part],
                    taught=None if self.taught is None else self.taught.each(operator.itemgetter(part)),
                    columns=self._each_column(operator.itemgetter(part)),
                ),
            )
            for part in parts
        ]

    def _with_rows_of(self, part: slice, batch: TokenBatch) -> TokenBatch:
        """Return a batch of some samples of this one, with their rows."""
        counts = self.row_counts[part]
        if self.rows is None or sum(counts) in (0, batch.tokens.numel()):
            return batch
        first = sum(self.row_counts[: part.start])
        rows = self.rows[first : first + sum(counts)] - part.start * self.tokens.shape[1]
        return replace(batch, rows=rows, row_counts=counts)

    def shifted(self, by: int) -> TokenBatch:
        """Return the tokens, labels and loss mask ``by`` places later in the same sequence (multi-token prediction).

        Behind the end of a sequence, all three are 0, so nothing counts in the loss there.

        Raises:
            DataError: this is a context-parallel share that was cut without tokens so much later.
        """
        if self.share is not None:
            if by > len(self.later):
                raise DataError(
                    f"a context-parallel share has tokens up to {len(self.later)} places later, not {by}: they lie in "
                    "other shares. Cut it with context_share(..., ahead=...)."
                )
            return self.later[by - 1]
        sequences = self.sequences
        # by sequence and not by row: the next document of a row must not show in this one
        behind = (sequences.positions + by >= sequences.expand(sequences.sizes)).view(self.tokens.shape)

        def shift(rows: Tensor) -> Tensor:
            return rows.reshape(-1).roll(-by).view(rows.shape).masked_fill(behind, 0)

        return replace(
            self,
            tokens=shift(self.tokens),
            labels=shift(self.labels),
            loss_mask=shift(self.loss_mask),
            taught=None,
            rows=None,
            row_counts=(),
            columns={},
        )

    def context_share(self, rank: int, size: int, multiple: int = 1, ahead: int = 0) -> TokenBatch:
        """Take the part of every sequence that one context-parallel rank holds (:meth:`PackedSequences.zigzag`).

        Padding carries no loss. Rows of one sequence each stay rows, ``[B, S / size]``. Rows of several documents
        become one row.

        Args:
            rank: which share.
            size: number of shares.
            multiple: the number of tokens of the share is a multiple of this.
            ahead: how many places later :meth:`shifted` must reach.

        Raises:
            DataError: rows have fewer tokens than ``2 * size`` chunks. Short documents inside a row are padded instead.
        """
        if size == 1:
            return self
        check_length(self.tokens.shape[1], size)
        share, index = self.sequences.zigzag(rank, size, multiple)
        # Documents are packed into one row: after the cut they no longer align with rows.
        shape = (1, share.num_tokens) if self.document_lengths is not None or share.uniform is None else share.uniform
        padding, places = index < 0, index.clamp(min=0)

        # Index 0 stands for padding, and the mask below overwrites what it took.
        def take(rows: Tensor) -> Tensor:
            return rows.reshape(-1)[places].masked_fill(padding, 0).view(shape)

        # Whole rows of padding have no loss, so what is taught there may be that of any token.
        taught = None
        if self.taught is not None:
            taught = self.taught.each(lambda rows: rows.flatten(0, 1)[places].view(*shape, *rows.shape[2:]))

        def cut(batch: TokenBatch) -> TokenBatch:
            return TokenBatch(take(batch.tokens), take(batch.labels), take(batch.loss_mask), share=share)

        # shifted before the cut: a share's next token may be the first of another share
        later = tuple(cut(self.shifted(by)) for by in range(1, ahead + 1))
        return replace(cut(self), later=later, places=places, taught=taught, columns=self._each_column(take))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        """Copy to ``device``. Copies from page-locked memory never make the host wait."""
        # From pinned memory a copy is asynchronous, and the batch is not written again.
        non_blocking, axes = non_blocking or self.tokens.is_pinned(), self.axis_positions
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            loss_mask=self.loss_mask.to(device, non_blocking=non_blocking),
            share=None if self.share is None else self.share.to(device, non_blocking),
            later=tuple(batch.to(device, non_blocking) for batch in self.later),
            places=None if self.places is None else self.places.to(device, non_blocking=non_blocking),
            axis_positions=None if axes is None else axes.to(device, non_blocking=non_blocking),
            taught=None
            if self.taught is None
            else self.taught.each(lambda rows: rows.to(device, non_blocking=non_blocking)),
            rows=None if self.rows is None else self.rows.to(device, non_blocking=non_blocking),
            columns=self._each_column(lambda column: column.to(device, non_blocking=non_blocking)),
        )

    def pin_memory(self) -> TokenBatch:
        """Copy to page-locked host memory."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            loss_mask=self.loss_mask.pin_memory(),
            share=None if self.share is None else self.share.pin_memory(),
            later=tuple(batch.pin_memory() for batch in self.later),
            places=None if self.places is None else self.places.pin_memory(),
            axis_positions=None if self.axis_positions is None else self.axis_positions.pin_memory(),
            taught=None if self.taught is None else self.taught.each(Tensor.pin_memory),
            rows=None if self.rows is None else self.rows.pin_memory(),
            columns=self._each_column(Tensor.pin_memory),
        )

    def _each_column(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {name: change(column) for name, column in self.columns.items()}
