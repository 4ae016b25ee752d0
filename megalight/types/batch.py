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
    """Rows of tokens with their labels: what language-model datasets yield and language-model steps consume.

    Attributes:
        tokens: ``[B, S]`` int64 inputs.
        labels: ``[B, S]`` int64: the token that follows each input.
        loss_mask: ``[B, S]`` float32: 1 where the label counts in the loss.
        document_lengths: for each row, the lengths of the documents it holds (they sum to ``S``): attention then does
            not cross documents and positions restart. None: a row is one sequence.
        share: how the tokens divide, where they are a share of cut sequences (:meth:`context_share`); None otherwise.
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
        """The packed form of the rows, on the tokens' device.

        Raises:
            DataError: the documents of a row do not fill it exactly.
        """
        if self.share is not None:
            return self.share
        batch, length = self.tokens.shape
        if self.document_lengths is None:
            return PackedSequences.of_uniform(batch, length, self.tokens.device)
        if [sum(row) for row in self.document_lengths] != [length] * batch:
            raise DataError(
                f"rows hold documents of {[sum(row) for row in self.document_lengths][:8]} tokens in all; there are "
                f"{batch} rows of {length}. Give each row's document lengths so that they sum to its length."
            )
        return PackedSequences.of_lengths([n for row in self.document_lengths for n in row], self.tokens.device)

    def split(self, size: int) -> list[TokenBatch]:
        """Micro-batches of ``size`` rows (the last may be smaller): views, no copy.

        Raises:
            DataError: this is a share of cut sequences.
        """
        if self.share is not None:
            raise DataError("a share of cut sequences cannot be split; take micro-batches first, then their shares.")
        rows = [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]
        documents = self.document_lengths
        return [
            TokenBatch(
                self.tokens[row], self.labels[row], self.loss_mask[row], None if documents is None else documents[row]
            )
            for row in rows
        ]

    def context_share(self, rank: int, size: int, multiple: int = 1) -> TokenBatch:
        """Share ``rank`` of ``size`` of every sequence, by :meth:`PackedSequences.zigzag`; its padding has no loss.

        Rows that are one sequence each stay rows, ``[B, S / size]``; documents become one row.

        Args:
            rank: which share.
            size: how many shares.
            multiple: the share's token count is a multiple of this.

        Raises:
            DataError: rows are shorter than there are chunks. (Shorter documents in them are padded.)
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
        """A copy on ``device``. From page-locked memory the host never waits for it."""
        non_blocking = non_blocking or self.tokens.is_pinned()
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            loss_mask=self.loss_mask.to(device, non_blocking=non_blocking),
            share=None if self.share is None else self.share.to(device, non_blocking),
        )

    def pin_memory(self) -> TokenBatch:
        """A copy in page-locked host memory."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            loss_mask=self.loss_mask.pin_memory(),
            share=None if self.share is None else self.share.pin_memory(),
        )
