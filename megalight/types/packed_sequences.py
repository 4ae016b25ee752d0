"""Packed sequences: how the tokens of a micro-batch, concatenated without padding, divide into sequences.

Context parallelism splits each sequence in zigzag order (:class:`ContextShare`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import gcd, lcm
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.errors import DataError


class AttentionSpan(NamedTuple):
    """What a token sees of its sequence, beside itself.

    Attributes:
        window: so many earlier tokens. None: all.
        chunk: of these, only those of its own chunk of so many tokens. None: all.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def earlier(self) -> int:
        """How many earlier tokens it sees at most."""
        return min(size for size in (self.window, self.chunk and self.chunk - 1) if size is not None)

    def first(self, position: int) -> int:
        """Return the first position that the token at ``position`` sees."""
        first = 0 if self.window is None else max(0, position - self.window)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)


@dataclass(frozen=True, eq=False)
class Pages:
    """The block tables of ``S`` sequences, of which a forward pass computes ``T`` new tokens.

    A pool has a row for each token of each block: row ``block * page_size + offset``. Layers that see the same have
    pools of equal blocks, so one table serves all of them. The host knows bounds alone, and never waits for the device:
    a decode step has the same shapes every time, and can be recorded.

    Attributes:
        block_table: ``[S, B]`` int32: the blocks of each sequence, in the order of its tokens. Entries after the last
            block are any block.
        lengths: ``[S]`` int32: stored tokens of each sequence, the new ones included.
        cu_queries: ``[S + 1]`` int32: the first new token of each sequence, then ``T``.
        write: ``[T]`` int64: the row of each new token.
        state_slot: ``[S]`` int64: the entry of each sequence in pools with one entry per sequence.
        query_lengths: the number of new tokens of each sequence; at most so many where the pass is recorded.
        bounds: for each sequence, at least its number of stored tokens, the new ones included.
        continued: whether a sequence may have earlier tokens.
        recorded: whether the pass is recorded: later ones have other numbers on the device, within the same bounds. A
            sequence without stored tokens sees nothing.
        spans: the pages of layers that see a limited span and keep no more. Their tables have any block before it.
        exact: whether bounds are these numbers themselves.
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
    recorded: bool = False
    spans: Mapping[AttentionSpan, Pages] = field(default_factory=dict)
    exact: bool = False

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
            self.recorded,
        )

    def owners(self, count: int) -> Tensor:
        """Return the sequence of each of the ``count`` new tokens, all that there are."""
        token = torch.arange(count, dtype=torch.int32, device=self.cu_queries.device)
        return torch.searchsorted(self.cu_queries, token, right=True) - 1

    def split(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the parts of tensors ``[T, ...]`` that belong to each sequence after those of :attr:`decodes`.

        Where the pass is recorded, a part has all rows, and zeros in the place of those of other sequences.
        """
        begin = self.decodes
        if not self.recorded:
            lengths = [*self.query_lengths[begin:]]
            yield from zip(*(torch.split(each[begin:], lengths) for each in rows), strict=True)
            return
        owner = self.owners(len(rows[0]))
        for place in range(begin, len(self.query_lengths)):
            yield tuple(each.masked_fill((owner != place).view(-1, *[1] * (each.dim() - 1)), 0) for each in rows)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return ``[T, ...]`` of the rows of sequences that decode, if there are any, and the parts of the others."""
        if not self.recorded:
            return torch.cat([*parts])
        whole = torch.stack([*parts[self.decodes > 0 :]])
        owner = self.owners(whole.shape[1])
        found = whole[(owner - self.decodes).clamp(min=0), torch.arange(len(owner), device=owner.device)]
        if not self.decodes:
            return found
        one = (owner[: self.decodes] < self.decodes).view(-1, *[1] * (found.dim() - 1))
        return torch.cat([torch.where(one, parts[0], found[: self.decodes]), found[self.decodes :]])

    def chunks(self, size: int, tokens: int) -> tuple[Tensor, Tensor, int]:
        """Divide each sequence after those of :attr:`decodes` into chunks of its own.

        Their number is known to the host; where the pass is recorded it is the most that there may be.

        Args:
            size: tokens of a chunk; in the last one of a sequence there may be fewer.
            tokens: ``T``.

        Returns:
            ``[n + 1]`` int32, the first chunk of each sequence, then their number; ``[m]``, the places of the last
            ``m`` tokens in the chunks; and how many chunks to have. Where the pass is recorded ``m`` is ``T``, and
            tokens before these sequences are at the last place, which no other token has.
        """
        begin, starts = self.decodes, self.cu_queries[self.decodes :]
        new = starts[1:] - starts[:-1]
        first = F.pad(((new + size - 1) // size).cumsum(0), (1, 0)).int()
        lengths = self.query_lengths[begin:]
        if self.recorded:
            skipped, count = 0, tokens // size + len(lengths) + 1
        else:
            skipped, count = sum(self.query_lengths[:begin]), sum(-(-length // size) for length in lengths)
        owner = self.owners(tokens)[skipped:] - begin
        own, token = owner.clamp(min=0), torch.arange(skipped, tokens, device=starts.device)
        places = first[own].long() * size + token - starts[own]
        return first, torch.where(owner < 0, count * size - 1, places), count

    def of(self, span: AttentionSpan | None) -> Pages:
        """Return the pages of layers that see a span (None: all): their own, or those of all layers."""
        return self if span is None else self.spans.get(span, self)

    def rows(self, first: int, counts: Sequence[int]) -> Tensor:
        """Return the rows ``[sum(counts)]`` of the first ``counts[i]`` tokens of the sequences from ``first`` on."""
        offset = torch.arange(max(counts), device=self.lengths.device)
        blocks = self.block_table[first:, offset // self.page_size].long()
        rows = blocks * self.page_size + offset % self.page_size
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])


def check_length(length: int, size: int) -> None:
    """Check that a row of ``length`` tokens has at least one token per chunk.

    A sequence is cut into ``2 n`` equal chunks for ``n`` shares. Share ``r`` holds chunk ``r``, followed by chunk
    ``2 n - 1 - r``. Under a causal mask an early chunk costs little and a late chunk costs much, so all shares cost
    the same.

    Raises:
        DataError: it has fewer than ``2 * size`` tokens.
    """
    if length < 2 * size:
        # With fewer tokens than chunks, some share would have no token of the sequence at all.
        raise DataError(
            f"a sequence has {length} tokens, but context parallelism over cp={size} ranks cuts each into "
            f"2 x cp = {2 * size} chunks; use sequences of {2 * size} tokens or more, or lower cp."
        )


def place_of(offset: Tensor, chunk: Tensor, rank: int, size: int) -> Tensor:
    """Map an offset in a share's part of a sequence to the position in the whole sequence.

    Args:
        offset: ``[T]``, from 0 to ``2 * chunk``.
        chunk: ``[T]``, tokens per chunk of the sequence that the token belongs to.
    """
    late = (offset >= chunk).long()  # 1 in the second chunk of the share
    # In the first chunk: rank * chunk + offset. In the second, `offset` counts from `chunk` on: add (2 size - 1 - rank)
    # - 1 chunks.
    return offset + chunk * (rank + late * 2 * (size - 1 - rank))


def offset_of(place: Tensor, chunk: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the share that holds a position, and the offset in that share's part: the inverse of :func:`place_of`."""
    index = place // chunk
    late = index >= size
    return index.where(~late, 2 * size - 1 - index), place % chunk + late * chunk


T = TypeVar("T")


@lru_cache(maxsize=64)
def _uniform_tensors(batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # The tensors are cached: if validation made them in inference mode, training could not save them for backward.
    with torch.inference_mode(False):
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        return offsets, torch.arange(length, device=device).repeat(batch)


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy host integers to a tensor on ``device`` without making the host wait for the device."""
    # Only copies from page-locked memory are asynchronous.
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """How ``T`` tokens, packed, divide into sequences.

    Lengths are Python integers, so no code waits for the device to learn a shape.

    Attributes:
        lengths: number of tokens of each sequence, on the host.
        cu_seqlens: ``[n + 1]`` int32, on the device: the start of each sequence, then ``T``.
        positions: ``[T]`` int64, on the device: the position of each token in its own sequence, for rotary and learned
            embeddings.
        uniform: ``(batch, length)`` if all sequences are equally long. Tensors can then be viewed as
            ``[batch, length, ...]`` without a copy, for dense attention kernels. None otherwise.
        axis_positions: ``[A, T]`` int64, on the device: the position of each token on several axes, such as time,
            height and width, for rotary embedding alone (:meth:`with_axes`). None: ``positions`` on every axis.
        num_padding: number of padding tokens at the end.
        keys: the sequences of keys and values if they differ from those of the queries (cross attention).
            None: they are the same. ``keys.lengths[i]`` belongs to query sequence ``i``, and the queries are its *last*
            tokens (bottom-right causal alignment).
        context: set if these tokens are one context-parallel share of their sequences (:meth:`zigzag`). Attention must
            then see the keys of all shares. None: the sequences are whole.
        pages: where the tokens lie in the pools of a cache, with earlier ones. None: nothing is stored.
        runs: runs of tokens that see each other in causal attention that is ``mutual``, such as those of an image: the
            first token and the number of each. No run spans two sequences. A share has none.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    positions: Tensor
    uniform: tuple[int, int] | None = None
    num_padding: int = 0
    keys: PackedSequences | None = None
    context: ContextShare | None = None
    pages: Pages | None = None
    axis_positions: Tensor | None = None
    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_uniform(cls, batch: int, length: int, device: torch.device | str = "cpu") -> PackedSequences:
        """Describe ``batch`` sequences of ``length`` tokens each.

        The device tensors are cached and shared between calls: do not write to them.
        """
        offsets, positions = _uniform_tensors(batch, length, torch.device(device))
        return cls((length,) * batch, offsets, positions, (batch, length))

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedSequences:
        """Describe sequences of the given lengths. Equal lengths give the uniform form.

        Raises:
            DataError: a length is below 1, or there is no sequence.
        """
        if not lengths or min(lengths) < 1:
            raise DataError(
                f"sequence lengths are {list(lengths)[:8]}; give at least one length, and each must be at least 1."
            )
        # Equal lengths have dense kernels, and need no offsets from the host.
        if len(set(lengths)) == 1:
            return cls.of_uniform(len(lengths), lengths[0], device)
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        cu_seqlens = to_device(offsets, torch.int32, torch.device(device))
        sizes = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        # `output_size`: without it, the host waits for the device to learn the length.
        starts = torch.repeat_interleave(cu_seqlens[:-1].long(), sizes, output_size=offsets[-1])
        positions = torch.arange(offsets[-1], device=device) - starts
        return cls(tuple(lengths), cu_seqlens, positions)

    def with_axes(self, positions: Tensor) -> PackedSequences:
        """Give each token positions ``[A, T]`` on several axes. Padding and shares keep them.

        Raises:
            DataError: there is not one column per token.
        """
        if positions.dim() != 2 or positions.shape[1] != self.num_tokens:
            raise DataError(
                f"positions on axes have shape {list(positions.shape)}; {self.num_tokens} tokens need [axes, "
                f"{self.num_tokens}]."
            )
        return replace(self, axis_positions=positions)

    @cached_property
    def later(self) -> LaterTokens | None:
        """The pairs of tokens in ``runs`` that a causal mask lacks; None: there are none."""
        long = [(first, count) for first, count in self.runs if count > 1]
        if not long:
            return None
        sequences = PackedSequences.of_lengths([count - 1 for _, count in long], self.device)
        ends = to_device([first + count - 2 for first, count in long], torch.int64, self.device)
        return LaterTokens(sequences.expand(ends) - sequences.positions, sequences)

    @property
    def rotary_positions(self) -> Tensor:
        """``[A, T]`` if tokens have positions on several axes, else ``[T]``."""
        return self.positions if self.axis_positions is None else self.axis_positions

    @property
    def num_tokens(self) -> int:
        """``T``, with padding."""
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        """Number of sequences, without those that hold only padding."""
        if self.context is not None:
            return len(self.lengths) - self.context.num_dummies
        count, padding = len(self.lengths), self.num_padding
        while padding > 0:
            count -= 1
            padding -= self.lengths[count]
        return count

    @property
    def num_real_tokens(self) -> int:
        """Number of tokens without padding; of a share, those of the whole sequences."""
        if self.context is not None:
            return sum(self.context.real_lengths[: self.num_sequences])
        return self.num_tokens - self.num_padding

    @property
    def max_length(self) -> int:
        """Length of the longest sequence here."""
        return max(self.lengths)

    @property
    def longest(self) -> int:
        """Length of the longest whole sequence: with its tokens in a cache, and with those in other shares."""
        if self.context is not None:
            return max(self.context.real_lengths)
        return max(self.pages.bounds) if self.pages is not None else (self.keys or self).max_length

    def check_longest(self, limit: int) -> None:
        """Refuse sequences longer than ``limit``, the model's ``max_sequence_length``. Nothing waits for the device.

        Raises:
            DataError: a sequence is too long.
        """
        if self.longest > limit:
            raise DataError(
                f"a sequence has {self.longest} tokens, but the model takes at most max_sequence_length = {limit}; "
                "shorten the sequences or configure a longer model."
            )

    @property
    def device(self) -> torch.device:
        """The device of ``cu_seqlens`` and ``positions``."""
        return self.cu_seqlens.device

    def pad_to(self, multiple: int) -> PackedSequences:
        """Append a dummy sequence so that ``T`` is a multiple of ``multiple``. If it already is, return ``self``.

        If ``keys`` are given, they get a dummy sequence of the same length.

        Raises:
            DataError: this is a context-parallel share. :meth:`zigzag` pads before it cuts.
        """
        missing = -self.num_tokens % multiple
        if missing and self.context is not None:
            raise DataError(
                f"a share of {self.num_tokens} tokens cannot be padded to a multiple of {multiple} after the cut; "
                f"use zigzag(rank, size, multiple={multiple}), which pads before it cuts."
            )
        # A sequence of its own: real tokens keep their neighbors and their positions.
        return self._with_dummy(missing) if missing else self

    def zigzag(self, rank: int, size: int, multiple: int = 1) -> tuple[PackedSequences, Tensor]:
        """Cut each sequence into ``2 * size`` equal chunks and return the two chunks of share ``rank``.

        Sequences are padded first, so that they divide. Equally long sequences stay equally long. Others get a dummy
        last sequence if ``multiple`` requires it. See :mod:`megalight.types.packed_sequences`.

        Args:
            multiple: the number of tokens of the share is a multiple of this.

        Returns:
            the share, with ``context`` set, and an index ``[T / size]``. The share's ``positions`` are positions in
            the whole sequences; padding has the position of the last token. The index holds, for each token of the
            share, its place in this pack, or -1 for padding.

        Raises:
            DataError: this is already a share, or it has ``keys``.
        """
        if self.context is not None or self.keys is not None:
            raise DataError(
                "a share, or queries with keys of their own, cannot be cut; call zigzag on the whole sequences."
            )
        chunks, dummies = _chunks(self, size, multiple)
        local = PackedSequences.of_lengths([2 * chunk for chunk in chunks], self.device)
        # Both as if uncut: `local` divides the share, `whole` all shares together.
        whole = PackedSequences.of_lengths([2 * size * chunk for chunk in chunks], self.device)
        sequence, chunk = local.expand(torch.arange(len(chunks), device=self.device)), local.expand(local.sizes // 2)
        place = place_of(local.positions, chunk, rank, size)
        # Dummy sequences have no real token, so each of their places is padding.
        tokens = torch.cat([self.sizes, self.sizes.new_zeros(dummies)])[sequence]
        # Padding of a sequence has places beyond its real tokens.
        index = torch.where(place < tokens, self.cu_seqlens[sequence] + place, -1)
        share = replace(
            local,
            # Rotary tables need a position for padding, too; that of the last token lies inside of them.
            positions=torch.minimum(place, (tokens - 1).clamp(min=0)),
            num_padding=2 * sum(chunks[len(chunks) - dummies :]),
            axis_positions=None if self.axis_positions is None else self.axis_positions[:, index.clamp(min=0)],
            context=ContextShare(rank, size, whole, (*self.lengths, *[1] * dummies), dummies),
        )
        return share, index

    @property
    def sizes(self) -> Tensor:
        """``[n]`` int64, on the device: the length of each sequence."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()

    @cached_property
    def token_mask(self) -> Tensor | None:
        """``[T]`` bool, on the device: False for padding. None: no token is padding."""
        share = self.context
        index = torch.arange(self.num_tokens, device=self.device)
        if share is None:
            return index < self.num_tokens - self.num_padding if self.num_padding else None
        # Nothing was padded, so the caller can skip the mask.
        if share.real_lengths == share.whole.lengths and not share.num_dummies:
            return None
        real = (*share.real_lengths[: len(self.lengths) - share.num_dummies], *[0] * share.num_dummies)
        chunk = self.expand(self.sizes // 2)
        place = place_of(index - self.expand(self.cu_seqlens[:-1].long()), chunk, share.rank, share.size)
        return place < self.expand(to_device(real, torch.int64, self.device))

    def expand(self, values: Tensor) -> Tensor:
        """Repeat values ``[n]``, one per sequence, to ``[T]``, one per token."""
        # `output_size`: the host knows the number, and need not wait for the device.
        return torch.repeat_interleave(values, self.sizes, output_size=self.num_tokens)

    def _with_dummy(self, length: int) -> PackedSequences:
        if self.pages is not None:
            raise DataError("sequences with pages cannot be padded: a padding token has no row in the pools.")
        lengths = (*self.lengths, length)
        places, axes = torch.arange(length, device=self.device), self.axis_positions
        return PackedSequences(
            lengths,
            # On the device, from the device's own offsets: no copy from the host.
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + length]),
            positions=torch.cat([self.positions, places]),
            uniform=(len(lengths), length) if set(lengths) == {length} else None,
            num_padding=self.num_padding + length,
            keys=self.keys._with_dummy(length) if self.keys is not None else None,
            axis_positions=None if axes is None else torch.cat([axes, places.expand(len(axes), -1)], dim=1),
            runs=self.runs,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedSequences:
        """Copy to ``device``."""
        axes = self.axis_positions
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
            keys=self.keys.to(device, non_blocking) if self.keys is not None else None,
            context=self.context.to(device, non_blocking) if self.context is not None else None,
            axis_positions=axes.to(device, non_blocking=non_blocking) if axes is not None else None,
        )

    def pin_memory(self) -> PackedSequences:
        """Copy to page-locked host memory."""
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.pin_memory(),
            positions=self.positions.pin_memory(),
            keys=self.keys.pin_memory() if self.keys is not None else None,
            context=self.context.pin_memory() if self.context is not None else None,
            axis_positions=self.axis_positions.pin_memory() if self.axis_positions is not None else None,
        )


@dataclass(frozen=True, eq=False)
class LaterTokens:
    """Each token of a run with the later ones of its run.

    In reverse order these pairs are causal: a query sees the key at its own place, and those before.

    Attributes:
        rows: ``[n]``: the tokens with later ones, run by run and from the last to the first. They are the queries.
        sequences: how these rows divide into runs.
    """

    rows: Tensor
    sequences: PackedSequences

    @cached_property
    def keys(self) -> Tensor:
        """``[n]``: the tokens that are the keys. That at the place of a query is the token after it."""
        return self.rows + 1


def _chunks(sequences: PackedSequences, size: int, multiple: int) -> tuple[list[int], int]:
    """Return the number of tokens per chunk of each sequence, and the number of dummy sequences at the end (0 or 1)."""
    chunks = [-(-length // (2 * size)) for length in sequences.lengths]
    if sequences.uniform is not None:  # pad with longer chunks: a dummy sequence would end the uniform form
        step = multiple // gcd(multiple, 2 * len(chunks))
        return [-(-chunks[0] // step) * step] * len(chunks), 0
    # A share holds two chunks of every sequence, the dummy included, so what is missing must be even.
    missing = -2 * sum(chunks) % lcm(2, multiple)
    return ([*chunks, missing // 2], 1) if missing else (chunks, 0)


@dataclass(frozen=True, eq=False)
class ContextShare:
    """The whole sequences that a context-parallel share belongs to.

    Attributes:
        rank: which share. It holds chunks ``rank`` and ``2 * size - 1 - rank`` of each sequence.
        whole: the padded sequences in natural order. Each share has ``1 / size`` of each sequence.
        real_lengths: tokens of each sequence without padding. A dummy sequence counts 1 token: its queries need one
            key, because a softmax over no key is NaN.
        num_dummies: number of sequences at the end that hold only padding.
        memo: cache of :meth:`once`.
    """

    rank: int
    size: int
    whole: PackedSequences
    real_lengths: tuple[int, ...]
    num_dummies: int = 0
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def real(self) -> PackedSequences:
        """The sequences before padding and cutting."""
        lengths = self.real_lengths[: len(self.real_lengths) - self.num_dummies]
        return self.whole if lengths == self.whole.lengths else PackedSequences.of_lengths(lengths, self.whole.device)

    @cached_property
    def order(self) -> Tensor:
        """``[T]``: the index of each token of ``real`` in the concatenation of all shares."""
        sequence = self.real.expand(torch.arange(len(self.real.lengths), device=self.real.device))
        return self.rows_of(sequence, self.real.positions)

    def once(self, name: Hashable, make: Callable[..., T], *args: object) -> T:
        """Return ``make(*args)``, cached under ``name``: all layers of one kind need the same tensors of a share."""
        if name not in self.memo:
            self.memo[name] = make(*args)
        found: T = self.memo[name]
        return found

    def rows_of(self, sequence: Tensor, place: Tensor) -> Tensor:
        """``[n]``: the index of tokens in the concatenation of all shares.

        Args:
            sequence: ``[n]``, the sequence of each token.
            place: ``[n]``, its position in that sequence.
        """
        chunk = (self.whole.sizes // (2 * self.size))[sequence]
        rank, offset = offset_of(place, chunk, self.size)
        start = self.whole.cu_seqlens[sequence].long() // self.size
        return rank * (self.whole.num_tokens // self.size) + start + offset

    def join(self, shares: Tensor) -> Tensor:
        """Reorder the concatenation of all shares, ``[whole.num_tokens, ...]``, as before the cut: ``[T, ...]``."""
        return shares.index_select(0, self.order)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ContextShare:
        """Copy to ``device``."""
        return replace(self, whole=self.whole.to(device, non_blocking))

    def pin_memory(self) -> ContextShare:
        """Copy to page-locked host memory."""
        return replace(self, whole=self.whole.pin_memory())
