"""Rows of tokens with labels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalight.errors import DataError
from megalight.types.packed import PackedSequences
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
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    document_lengths: tuple[tuple[int, ...], ...] | None = None
    share: PackedSequences | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequences(self) -> PackedSequences:
        """How the tokens, laid end to end, divide into sequences; on the device of the tokens.

        Raises:
            DataError: the document lengths of a row do not sum to its length.
        """
        if self.share is not None:
            return self.share
        batch, length = self.tokens.shape
        if self.document_lengths is None:
            return PackedSequences.of_uniform(batch, length, self.tokens.device)
        if [sum(row) for row in self.document_lengths] != [length] * batch:
            raise DataError(
                f"the document lengths of the rows sum to {[sum(row) for row in self.document_lengths][:8]}, but the "
                f"batch has {batch} rows of {length} tokens. The document lengths of each row must sum to its length."
            )
        return PackedSequences.of_lengths([n for row in self.document_lengths for n in row], self.tokens.device)

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
        rows = [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]
        documents = self.document_lengths
        return [
            TokenBatch(
                self.tokens[row], self.labels[row], self.loss_mask[row], None if documents is None else documents[row]
            )
            for row in rows
        ]

    def context_share(self, rank: int, size: int, multiple: int = 1) -> TokenBatch:
        """Take the part of every sequence that one context-parallel rank holds (:meth:`PackedSequences.zigzag`).

        Padding carries no loss. Rows of one sequence each stay rows, ``[B, S / size]``. Rows of several documents
        become one row.

        Args:
            rank: which share.
            size: number of shares.
            multiple: the number of tokens of the share is a multiple of this.

        Raises:
            DataError: rows have fewer tokens than ``2 * size`` chunks. Short documents inside a row are padded instead.
        """
        if size == 1:
            return self
        check_length(self.tokens.shape[1], size)
        share, index = self.sequences.zigzag(rank, size, multiple)
        shape = (1, share.num_tokens) if self.document_lengths is not None or share.uniform is None else share.uniform
        padding, source = index < 0, index.clamp(min=0)

        def take(rows: Tensor) -> Tensor:
            return rows.reshape(-1)[source].masked_fill(padding, 0).view(shape)

        return TokenBatch(take(self.tokens), take(self.labels), take(self.loss_mask), share=share)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        """Copy to ``device``. Copies from page-locked memory never make the host wait."""
        non_blocking = non_blocking or self.tokens.is_pinned()
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            loss_mask=self.loss_mask.to(device, non_blocking=non_blocking),
            share=None if self.share is None else self.share.to(device, non_blocking),
        )

    def pin_memory(self) -> TokenBatch:
        """Copy to page-locked host memory."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            loss_mask=self.loss_mask.pin_memory(),
            share=None if self.share is None else self.share.pin_memory(),
        )
