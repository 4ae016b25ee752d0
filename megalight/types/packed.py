"""Packed sequences: how tokens laid end to end divide."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import gcd, lcm
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalight.errors import DataError
from megalight.types.zigzag import offset_of, place_of

T = TypeVar("T")


@lru_cache(maxsize=64)
def _uniform_tensors(batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # cached: what validation makes first, training must be able to save for backward
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        return offsets, torch.arange(length, device=device).repeat(batch)


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host integers as a device tensor, without making the host wait for the device."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """How ``T`` tokens, laid end to end, divide into sequences.

    Everything a host needs to plan work (lengths, the longest, uniformity) is a Python integer, so that no code waits
    for the device to learn a shape.

    Attributes:
        lengths: tokens of each sequence, on the host.
        cu_seqlens: ``[n + 1]`` int32, on the device: where each sequence starts, and ``T`` last.
        positions: ``[T]`` int64, on the device: each token's place in its own sequence, for rotary and learned
            embeddings.
        uniform: ``(batch, length)`` when all sequences are equally long: tensors may then be viewed as
            ``[batch, length, ...]`` at no cost, and dense attention kernels serve. None otherwise.
        num_padding: tokens at the end that :meth:`pad_to` added.
        keys: the description of keys and values where it differs from the queries' (caches, cross attention);
            None means the same. ``keys.lengths[i]`` belongs to query sequence ``i``, and queries are its *last*
            tokens (bottom-right causal alignment).
        context: set where these tokens are one of several shares of their sequences (:meth:`zigzag`); attention then
            has to look at all shares. None: the sequences are whole.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    positions: Tensor
    uniform: tuple[int, int] | None = None
    num_padding: int = 0
    keys: PackedSequences | None = None
    context: ContextShare | None = None

    @classmethod
    def of_uniform(cls, batch: int, length: int, device: torch.device | str = "cpu") -> PackedSequences:
        """``batch`` sequences of ``length`` tokens each. The device tensors are cached and shared: do not write."""
        offsets, positions = _uniform_tensors(batch, length, torch.device(device))
        return cls((length,) * batch, offsets, positions, (batch, length))

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedSequences:
        """Sequences of the given lengths. Equal lengths give the uniform form.

        Raises:
            DataError: a length below 1, or no sequence at all.
        """
        if not lengths or min(lengths) < 1:
            raise DataError(
                f"sequence lengths are {list(lengths)[:8]}; each must be at least 1, and one must be given."
            )
        if len(set(lengths)) == 1:
            return cls.of_uniform(len(lengths), lengths[0], device)
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        cu_seqlens = to_device(offsets, torch.int32, torch.device(device))
        sizes = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        starts = torch.repeat_interleave(cu_seqlens[:-1].long(), sizes, output_size=offsets[-1])
        positions = torch.arange(offsets[-1], device=device) - starts
        return cls(tuple(lengths), cu_seqlens, positions)

    @property
    def num_tokens(self) -> int:
        """``T``, padding included."""
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest whole sequence: with those in a cache, and with those in other shares."""
        if self.context is not None:
            return max(self.context.real_lengths)
        return (self.keys or self).max_length

    @property
    def device(self) -> torch.device:
        """Where ``cu_seqlens`` and ``positions`` live."""
        return self.cu_seqlens.device

    def pad_to(self, multiple: int) -> PackedSequences:
        """The same sequences with ``T`` brought to a multiple by a dummy last sequence (none when it is one already).

        Keys that differ get a dummy sequence of the same length.

        Raises:
            DataError: this is a share of cut sequences; :meth:`zigzag` pads before it cuts.
        """
        missing = -self.num_tokens % multiple
        if missing and self.context is not None:
            raise DataError(
                f"a share of {self.num_tokens} tokens cannot be padded to a multiple of {multiple} any more; "
                f"cut with zigzag(rank, size, multiple={multiple}), which pads before it cuts."
            )
        return self._with_dummy(missing) if missing else self

    def zigzag(self, rank: int, size: int, multiple: int = 1) -> tuple[PackedSequences, Tensor]:
        """Share ``rank`` of ``size``: of each sequence, padded and cut into ``2 * size`` chunks, two.

        Equally long sequences stay so; others get, where ``multiple`` wants it, a dummy last sequence.

        Args:
            rank: which share.
            size: how many shares.
            multiple: the share's token count is a multiple of this.

        Returns:
            the share, with ``context`` set, whose ``positions`` are places in the whole sequences (of padding: the
            place of the last token); and ``[T / size]``, for each of its tokens its place in this pack, or -1 for
            padding.

        Raises:
            DataError: these are not whole sequences.
        """
        if self.context is not None or self.keys is not None:
            raise DataError("a share, or queries with keys of their own, cannot be cut; cut the whole sequences.")
        chunks, dummies = _chunks(self, size, multiple)
        local = PackedSequences.of_lengths([2 * chunk for chunk in chunks], self.device)
        whole = PackedSequences.of_lengths([2 * size * chunk for chunk in chunks], self.device)
        sequence, chunk = local.expand(torch.arange(len(chunks), device=self.device)), local.expand(local.sizes // 2)
        place = place_of(local.positions, chunk, rank, size)
        tokens = torch.cat([self.sizes, self.sizes.new_zeros(dummies)])[sequence]
        index = torch.where(place < tokens, self.cu_seqlens[sequence] + place, -1)
        share = replace(
            local,
            positions=torch.minimum(place, (tokens - 1).clamp(min=0)),
            num_padding=2 * sum(chunks[len(chunks) - dummies :]),
            context=ContextShare(rank, size, whole, (*self.lengths, *[1] * dummies), dummies),
        )
        return share, index

    @property
    def sizes(self) -> Tensor:
        """``[n]`` int64, on the device: the lengths."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()

    def expand(self, values: Tensor) -> Tensor:
        """``[n]``, one value per sequence, as ``[T]``, one per token."""
        return torch.repeat_interleave(values, self.sizes, output_size=self.num_tokens)

    def _with_dummy(self, length: int) -> PackedSequences:
        lengths = (*self.lengths, length)
        return PackedSequences(
            lengths,
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + length]),
            positions=torch.cat([self.positions, torch.arange(length, device=self.device)]),
            uniform=(len(lengths), length) if set(lengths) == {length} else None,
            num_padding=self.num_padding + length,
            keys=self.keys._with_dummy(length) if self.keys is not None else None,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedSequences:
        """A copy on ``device``."""
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
            keys=self.keys.to(device, non_blocking) if self.keys is not None else None,
            context=self.context.to(device, non_blocking) if self.context is not None else None,
        )

    def pin_memory(self) -> PackedSequences:
        """A copy in page-locked host memory."""
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.pin_memory(),
            positions=self.positions.pin_memory(),
            keys=self.keys.pin_memory() if self.keys is not None else None,
            context=self.context.pin_memory() if self.context is not None else None,
        )


def _chunks(sequences: PackedSequences, size: int, multiple: int) -> tuple[list[int], int]:
    """Tokens per chunk of each sequence, and of how many dummy sequences (0 or 1) after them."""
    chunks = [-(-length // (2 * size)) for length in sequences.lengths]
    if sequences.uniform is not None:  # longer chunks keep the sequences equal, which a dummy would not
        step = multiple // gcd(multiple, 2 * len(chunks))
        return [-(-chunks[0] // step) * step] * len(chunks), 0
    missing = -2 * sum(chunks) % lcm(2, multiple)
    return ([*chunks, missing // 2], 1) if missing else (chunks, 0)


@dataclass(frozen=True, eq=False)
class ContextShare:
    """What a share of cut sequences knows of the whole.

    Attributes:
        rank: which share: it holds chunks ``rank`` and ``2 * size - 1 - rank`` of each sequence.
        size: how many shares.
        whole: the padded sequences, in natural order; a share has ``1 / size`` of each.
        real_lengths: tokens of each sequence that are not padding. A dummy sequence counts one, so that its tokens
            have a key to look at.
        num_dummies: sequences at the end that hold padding alone.
        memo: what was worked out :meth:`once` for this share.
    """

    rank: int
    size: int
    whole: PackedSequences
    real_lengths: tuple[int, ...]
    num_dummies: int = 0
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def real(self) -> PackedSequences:
        """The sequences as they were before padding and cut."""
        lengths = self.real_lengths[: len(self.real_lengths) - self.num_dummies]
        return self.whole if lengths == self.whole.lengths else PackedSequences.of_lengths(lengths, self.whole.device)

    @cached_property
    def order(self) -> Tensor:
        """``[T]``: where each token of ``real`` lies among the tokens of all shares, laid one after another."""
        sequence = self.real.expand(torch.arange(len(self.real.lengths), device=self.real.device))
        return self.rows_of(sequence, self.real.positions)

    def once(self, name: Hashable, make: Callable[..., T], *args: object) -> T:
        """``make(*args)``, kept under ``name``: layers of one kind need the same of a share."""
        if name not in self.memo:
            self.memo[name] = make(*args)
        found: T = self.memo[name]
        return found

    def rows_of(self, sequence: Tensor, place: Tensor) -> Tensor:
        """``[n]``: where tokens lie among those of all shares, laid one after another.

        Args:
            sequence: ``[n]``, which sequence each is in.
            place: ``[n]``, its place there.
        """
        chunk = (self.whole.sizes // (2 * self.size))[sequence]
        rank, offset = offset_of(place, chunk, self.size)
        start = self.whole.cu_seqlens[sequence].long() // self.size
        return rank * (self.whole.num_tokens // self.size) + start + offset

    def join(self, shares: Tensor) -> Tensor:
        """``[size * T / size, ...]``, all shares one after another, as ``[T, ...]`` in their order before the cut."""
        return shares.index_select(0, self.order)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ContextShare:
        """A copy on ``device``."""
        return replace(self, whole=self.whole.to(device, non_blocking))

    def pin_memory(self) -> ContextShare:
        """A copy in page-locked host memory."""
        return replace(self, whole=self.whole.pin_memory())
