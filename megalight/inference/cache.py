"""A plain cache of keys and values: one buffer per layer with room for every sequence at its longest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalight.errors import DataError
from megalight.types import PackedSequences


@dataclass
class _Step:
    """Where the tokens of the step in progress lie in the buffers, which are seen as ``[slots * capacity, Hkv, D]``.

    Attributes:
        write: ``[T]`` rows of the new tokens.
        read: ``[Tk]`` rows of all tokens of the sequences in the step.
    """

    write: Tensor
    read: Tensor


class LayerBuffers:
    """One layer's keys and values. Buffers are made at the first append, in the shape and type of what comes."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._buffers: tuple[Tensor, Tensor] | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[T, Hkv, D]`` of the step's new tokens; returns those of all tokens so far, ``[Tk, Hkv, D]``."""
        step = self._cache.step
        assert step is not None, "call KVCache.extend before the model's forward"
        if self._buffers is None:
            rows = self._cache.num_slots * self._cache.capacity
            self._buffers = k.new_empty(rows, *k.shape[1:]), v.new_empty(rows, *v.shape[1:])
        keys, values = self._buffers
        keys[step.write], values[step.write] = k, v
        return keys[step.read], values[step.read]


class KVCache:
    """Keys and values of several sequences, each in its own slot, growing at its own pace.

    Args:
        layers: names of the layers, as in the model's ``layers``.
        num_slots: sequences it has room for.
        capacity: tokens that each slot has room for.

    Attributes:
        layers: what to pass to the model as ``cache``.
        lengths: tokens stored per slot.
    """

    def __init__(self, layers: Iterable[str], num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.lengths = [0] * num_slots
        self.layers = {name: LayerBuffers(self) for name in layers}
        self.step: _Step | None = None

    def extend(self, slots: Sequence[int], counts: Sequence[int], device: torch.device | str) -> PackedSequences:
        """Make room for ``counts[i]`` more tokens in ``slots[i]``; then run the model once on just these tokens.

        Returns:
            the new tokens as queries, with their true positions, and as ``keys`` all tokens of these slots.

        Raises:
            DataError: a slot would hold more than ``capacity``.
        """
        past = [self.lengths[slot] for slot in slots]
        totals = [before + count for before, count in zip(past, counts, strict=True)]
        if max(totals) > self.capacity:
            raise DataError(
                f"a sequence would have {max(totals)} tokens and the cache has room for {self.capacity}; "
                "make the cache larger."
            )
        for slot, total in zip(slots, totals, strict=True):
            self.lengths[slot] = total
        new, keys = PackedSequences.of_lengths(counts, device), PackedSequences.of_lengths(totals, device)
        positions = _offset(new, past)
        first_rows = [slot * self.capacity for slot in slots]
        self.step = _Step(write=_offset(replace(new, positions=positions), first_rows), read=_offset(keys, first_rows))
        return replace(new, positions=positions, keys=keys if any(past) else None)


def _offset(sequences: PackedSequences, offsets: Sequence[int]) -> Tensor:
    """``[T]`` positions, plus each sequence's own offset."""
    device = sequences.device
    sizes = (sequences.cu_seqlens[1:] - sequences.cu_seqlens[:-1]).long()
    starts = torch.tensor(offsets, device=device)
    return sequences.positions + torch.repeat_interleave(starts, sizes, output_size=sequences.num_tokens)
