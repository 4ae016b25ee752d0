"""A cache for the states of layers. Rows of tokens lie in blocks, which sequences take from one pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError, DataError
from megalight.inference.blocks import BlockPool
from megalight.types import PackedSequences
from megalight.types.packed_sequences import to_device


@dataclass
class _Step:
    """The sequences of the current forward pass.

    Attributes:
        slots: ``[n]``, the slot of each sequence.
        begins: ``[n]``, whether the sequence is new, without earlier tokens.
        write: ``[T]``, indices of the new tokens' rows in buffers of shape ``[blocks.count * blocks.size, ...]``.
        read: ``[Tk]``, indices of the rows of all tokens of these sequences.
    """

    slots: Tensor
    begins: Tensor
    write: Tensor
    read: Tensor


class TokenBuffer:
    """Storage for one row per token, in the blocks of the cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._rows: Tensor | None = None

    def drop(self) -> None:
        """Give the memory back."""
        self._rows = None

    def append(self, rows: Tensor) -> Tensor:
        """Store the rows ``[T, ...]`` of the new tokens; return the rows ``[Tk, ...]`` of all tokens so far."""
        step = self._cache.step
        if self._rows is None:
            # The whole pool at once, so that addresses stay fixed.
            blocks = self._cache.blocks
            self._rows = rows.new_empty(blocks.count * blocks.size, *rows.shape[1:])
        # Write before read: the new tokens attend to themselves too.
        self._rows[step.write] = rows
        return self._rows[step.read]


class SequenceBuffer:
    """Storage for one entry per slot, and for the snapshots of ``blocks``."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._entries: Tensor | None = None

    def drop(self) -> None:
        """Give the memory back."""
        self._entries = None

    def read(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the entries ``[n, *shape]`` of the step's sequences. New sequences get 0, not a slot's old values."""
        if self._entries is None:
            self._entries = like.new_empty(self._cache.num_slots + self._cache.blocks.snapshots, *shape)
        step = self._cache.step
        # Slots are reused without zeroing; only a new sequence must not see what the last one left.
        begins = step.begins.view(-1, *[1] * len(shape))
        return self._entries[step.slots].masked_fill(begins, 0)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy entries."""
        assert self._entries is not None
        self._entries[targets] = self._entries[sources]

    def write(self, entries: Tensor) -> None:
        """Store the entries ``[n, *shape]`` of the step's sequences."""
        assert self._entries is not None
        self._entries[self._cache.step.slots] = entries


class Cache:
    """The states of a model's layers for several sequences. Each sequence has its own slot and its own length.

    Every layer makes its state with ``layer.make_state(slots)``. The cache is passed as ``slots``.

    Args:
        layers: the model's layers, by name.
        num_slots: maximum number of sequences.
        capacity: maximum number of tokens in each slot.
        blocks: the pool of blocks that hold the tokens of all slots. None: every slot has one block of ``capacity``
            tokens.

    Attributes:
        states: argument ``states`` of the model.
        lengths: number of stored tokens of each slot.
        reversible: whether a slot can forget its last tokens: all states have one row per token.

    Raises:
        ConfigurationError: a layer has no ``make_state``.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module] | nn.ModuleDict,
        num_slots: int,
        capacity: int,
        blocks: BlockPool | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.blocks = blocks or BlockPool(num_slots, num_slots, capacity)
        self.lengths = [0] * num_slots
        self.reversible = True
        # Where the positions of a slot's next tokens are not their number: images take fewer positions than tokens.
        self._ahead = [0] * num_slots
        self._axes: int | None = None
        self._step: _Step | None = None
        self._buffers: list[TokenBuffer | SequenceBuffer] = []
        self.states: dict[str, Any] = {}
        for name, layer in layers.items():
            if not hasattr(layer, "make_state"):
                raise ConfigurationError(
                    f"layers.{name} ({type(layer).__name__}) has no method make_state(slots), so the cache cannot keep "
                    "what it needs of earlier tokens; define it, as megalight.nn.TransformerLayer does."
                )
            self.states[name] = layer.make_state(self)  # type: ignore[operator]

    @property
    def step(self) -> _Step:
        """The sequences of the current forward pass."""
        assert self._step is not None, "call Cache.extend before the model's forward"
        return self._step

    def per_token(self) -> TokenBuffer:
        """Make storage for one row per token."""
        buffer = TokenBuffer(self)
        self._buffers.append(buffer)
        return buffer

    def per_sequence(self) -> SequenceBuffer:
        """Make storage for one entry per sequence."""
        self.reversible = False
        buffer = SequenceBuffer(self)
        self._buffers.append(buffer)
        return buffer

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a slot.

        Raises:
            ConfigurationError: a layer has one state for all tokens of a slot.
        """
        if not self.reversible:
            raise ConfigurationError(
                "a layer keeps one state for all tokens of a slot, which cannot forget the last ones. Restart the slot."
            )
        # The rows stay, and are written over.
        self.lengths[slot] = length
        self.blocks.shrink(slot, length)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states of sequences, each from a slot or snapshot to another."""
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        for buffer in self._buffers if pairs else ():
            if isinstance(buffer, SequenceBuffer):
                buffer.copy(sources, targets)

    def begin(self, slot: int, blocks: Sequence[int]) -> None:
        """Begin a slot's sequence with full blocks of the pool, which hold its first tokens (``blocks.prefixes``).

        If the cache is not :attr:`reversible`, the state at their end must be copied to the slot before it is extended.
        """
        self.blocks.share(slot, blocks)
        self.lengths[slot] = len(blocks) * self.blocks.size

    def release(self, slot: int) -> None:
        """Forget a slot's sequence and take its blocks back. The slot's next tokens begin a new sequence."""
        # Entries of sequences stay, too: `begins` hides them from the next one.
        self.lengths[slot] = self._ahead[slot] = 0
        self.blocks.shrink(slot, 0)

    def drop(self) -> None:
        """Forget all sequences and give the memory back. The next forward pass allocates it again."""
        for slot in range(self.num_slots):
            self.release(slot)
        self.blocks.prefixes.clear()
        self._step = None
        for buffer in self._buffers:
            buffer.drop()

    def extend(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        device: torch.device | str,
        axis_positions: Sequence[Tensor] | None = None,
    ) -> PackedSequences:
        """Reserve ``counts[i]`` more tokens in ``slots[i]``. Then run the model once on exactly these tokens.

        Args:
            slots: the slots.
            counts: the number of new tokens of each.
            device: device of the tokens.
            axis_positions: for each slot ``[A, counts[i]]``, on the host: positions of the new tokens on several axes.
                None: they follow the largest position of the slot's tokens, the same on each axis.

        Returns:
            the new tokens as queries, with their positions in the sequence, and all tokens of these slots as ``keys``.

        Raises:
            DataError: a slot would have more than ``capacity`` tokens, too few blocks are free, or positions are not
                those of the tokens.
        """
        past = [self.lengths[slot] for slot in slots]
        # Checked before lengths change: an error leaves the cache as it was.
        totals = [before + count for before, count in zip(past, counts, strict=True)]
        if max(totals) > self.capacity:
            raise DataError(
                f"a sequence would have {max(totals)} tokens and the cache has room for {self.capacity}; "
                "make the cache larger."
            )
        self.blocks.grow(dict(zip(slots, totals, strict=True)))
        for slot, total in zip(slots, totals, strict=True):
            self.lengths[slot] = total
        # Lengths are host numbers, so nothing waits for the device.
        new, keys = PackedSequences.of_lengths(counts, device), PackedSequences.of_lengths(totals, device)
        positions = _offset(new, past)
        where = _TokenPositions([self.blocks.tables[slot] for slot in slots], self.blocks.size, new.device)
        self._step = _Step(
            slots=torch.tensor(slots, device=device),
            begins=torch.tensor([before == 0 for before in past], device=device),
            write=where.rows(new, positions),
            read=where.rows(keys, keys.positions),
        )
        # without earlier tokens the keys are the new tokens themselves, and attention can use its simpler form
        new = replace(new, positions=positions, keys=keys if any(past) else None)
        if axis_positions is not None:
            self._axes = len(axis_positions[0])
            for slot, total, each in zip(slots, totals, axis_positions, strict=True):
                self._ahead[slot] = int(each.max()) + 1 - total
            return new.with_axes(torch.cat(list(axis_positions), dim=1).to(device))
        if self._axes is None:
            return new
        following = positions + new.expand(torch.tensor([self._ahead[slot] for slot in slots], device=device))
        return new.with_axes(following.expand(self._axes, -1))


class _TokenPositions:
    """Where the tokens of several sequences lie.

    Args:
        tables: the blocks of each sequence.
        size: tokens of a block.
        device: of the sequences.
    """

    def __init__(self, tables: Sequence[Sequence[int]], size: int, device: torch.device) -> None:
        self._size = size
        # All tables end to end, and where each begins: tables of any lengths need no padding.
        self._blocks = to_device([block for table in tables for block in table], torch.int64, device)
        begins = [0, *accumulate(map(len, tables))][:-1]
        self._begins = to_device(begins, torch.int64, device)

    def rows(self, sequences: PackedSequences, positions: Tensor) -> Tensor:
        """Return the rows ``[T]`` of tokens, given their positions ``[T]`` in their sequences."""
        block = self._blocks[sequences.expand(self._begins) + positions // self._size]
        return block * self._size + positions % self._size


def _offset(sequences: PackedSequences, offsets: Sequence[int]) -> Tensor:
    """Return positions ``[T]`` plus the offset of each sequence."""
    return sequences.positions + sequences.expand(torch.tensor(offsets, device=sequences.device))
