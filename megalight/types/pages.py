"""Pages: where the tokens of the sequences of a forward pass lie in pools of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pages:
    """The block tables of ``S`` sequences, of which a forward pass computes ``T`` new tokens.

    A pool has a row for each token of each block: row ``block * page_size + offset``. All layers have pools of equal
    blocks, so one table serves all of them. The host knows bounds alone, and never waits for the device: a decode step
    has the same shapes every time, and can be recorded.

    Attributes:
        block_table: ``[S, B]`` int32: the blocks of each sequence, in the order of its tokens. Entries after the last
            block are any block.
        lengths: ``[S]`` int32: stored tokens of each sequence, the new ones included.
        cu_queries: ``[S + 1]`` int32: the first new token of each sequence, then ``T``.
        write: ``[T]`` int64: the row of each new token.
        state_slot: ``[S]`` int64: the entry of each sequence in pools with one entry per sequence.
        page_size: tokens of a block.
        query_lengths: the number of new tokens of each sequence.
        bounds: for each sequence, at least its number of stored tokens, the new ones included.
        continued: whether a sequence may have earlier tokens.
    """

    block_table: Tensor
    lengths: Tensor
    cu_queries: Tensor
    write: Tensor
    state_slot: Tensor
    page_size: int
    query_lengths: tuple[int, ...]
    bounds: tuple[int, ...]
    continued: bool

    @cached_property
    def decodes(self) -> int:
        """How many sequences, from the first on, have one new token."""
        return next((place for place, count in enumerate(self.query_lengths) if count != 1), len(self.query_lengths))

    @cached_property
    def begins(self) -> Tensor:
        """``[S]`` bool: whether the sequence has no earlier tokens."""
        return self.lengths == self.cu_queries[1:] - self.cu_queries[:-1]

    def read(self, pool: Tensor) -> Tensor:
        """Return the entries ``[S, ...]`` of the sequences in a pool ``[num_slots, ...]``. New sequences have zeros."""
        if not self.continued:
            return pool.new_zeros(len(self.query_lengths), *pool.shape[1:])
        # Entries are reused without zeroing; only a new sequence must not see what the last one left.
        return pool[self.state_slot].masked_fill(self.begins.view(-1, *[1] * (pool.dim() - 1)), 0)

    def store(self, pool: Tensor, entries: Tensor) -> None:
        """Store the entries ``[S, ...]`` of the sequences in a pool."""
        with torch.no_grad():
            pool[self.state_slot] = entries

    def leading(self, count: int) -> Pages:
        """Return the first ``count`` sequences."""
        tokens = sum(self.query_lengths[:count])
        return Pages(
            self.block_table[:count],
            self.lengths[:count],
            self.cu_queries[: count + 1],
            self.write[:tokens],
            self.state_slot[:count],
            self.page_size,
            self.query_lengths[:count],
            self.bounds[:count],
            self.continued,
        )

    def rows(self, first: int, counts: Sequence[int]) -> Tensor:
        """Return the rows ``[sum(counts)]`` of the first ``counts[i]`` tokens of the sequences from ``first`` on."""
        offset = torch.arange(max(counts), device=self.lengths.device)
        blocks = self.block_table[first:, offset // self.page_size].long()
        rows = blocks * self.page_size + offset % self.page_size
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
