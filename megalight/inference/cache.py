"""A plain cache: what the layers of a model keep of earlier tokens, with room for every sequence at its longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError, DataError
from megalight.types import PackedSequences


@dataclass
class _Step:
    """The sequences of the forward pass in progress.

    Attributes:
        slots: ``[n]``, the slot of each sequence.
        begins: ``[n]``, the sequence has no earlier tokens.
        write: ``[T]``, where rows of the new tokens go in buffers that are seen as ``[num_slots * capacity, ...]``.
        read: ``[Tk]``, where the rows of all tokens of these sequences are.
    """

    slots: Tensor
    begins: Tensor
    write: Tensor
    read: Tensor


class TokenBuffer:
    """Room for one row per token: ``capacity`` of them in every slot."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._rows: Tensor | None = None

    def append(self, rows: Tensor) -> Tensor:
        """Store ``[T, ...]`` of the step's new tokens; returns those of all tokens so far, ``[Tk, ...]``."""
        step = self._cache.step
        if self._rows is None:
            self._rows = rows.new_empty(self._cache.num_slots * self._cache.capacity, *rows.shape[1:])
        self._rows[step.write] = rows
        return self._rows[step.read]


class SequenceBuffer:
    """Room for one entry per slot."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._entries: Tensor | None = None

    def read(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """``[n, *shape]`` of the step's sequences; 0 for those that begin, whatever was in their slots before."""
        if self._entries is None:
            self._entries = like.new_empty(self._cache.num_slots, *shape)
        step = self._cache.step
        begins = step.begins.view(-1, *[1] * len(shape))
        return self._entries[step.slots].masked_fill(begins, 0)

    def write(self, entries: Tensor) -> None:
        """Store ``[n, *shape]``."""
        assert self._entries is not None
        self._entries[self._cache.step.slots] = entries


class Cache:
    """What the layers of a model keep of several sequences, each in its own slot, growing at its own pace.

    Every layer is asked what it keeps, by ``layer.make_state(slots)``; the cache stands for the slots.

    Args:
        layers: the model's layers, by name.
        num_slots: sequences it has room for.
        capacity: tokens that each slot has room for.

    Attributes:
        states: what to pass to the model as ``states``.
        lengths: tokens stored per slot.

    Raises:
        ConfigurationError: a layer cannot say what it keeps.
    """

    def __init__(self, layers: Mapping[str, nn.Module] | nn.ModuleDict, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.lengths = [0] * num_slots
        self._step: _Step | None = None
        self.states: dict[str, Any] = {}
        for name, layer in layers.items():
            if not hasattr(layer, "make_state"):
                raise ConfigurationError(
                    f"layers.{name} is a {type(layer).__name__} without make_state(slots), so nothing is known of what "
                    "it keeps of earlier tokens; give it that method, as megalight.nn.TransformerLayer has it."
                )
            self.states[name] = layer.make_state(self)  # type: ignore[operator]

    @property
    def step(self) -> _Step:
        """Of the forward pass in progress."""
        assert self._step is not None, "call Cache.extend before the model's forward"
        return self._step

    def per_token(self) -> TokenBuffer:
        """Room for a row per token."""
        return TokenBuffer(self)

    def per_sequence(self) -> SequenceBuffer:
        """Room for an entry per sequence."""
        return SequenceBuffer(self)

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
        self._step = _Step(
            slots=torch.tensor(slots, device=device),
            begins=torch.tensor([before == 0 for before in past], device=device),
            write=_offset(replace(new, positions=positions), first_rows),
            read=_offset(keys, first_rows),
        )
        return replace(new, positions=positions, keys=keys if any(past) else None)


def _offset(sequences: PackedSequences, offsets: Sequence[int]) -> Tensor:
    """``[T]`` positions, plus each sequence's own offset."""
    return sequences.positions + sequences.expand(torch.tensor(offsets, device=sequences.device))
