"""A cache for the states of layers. Rows of tokens lie in blocks, which sequences take from one pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megalight.errors import ConfigurationError, DataError
from megalight.inference.blocks import BlockPool, SpanBlocks
from megalight.ops.sample_tokens import FAILED
from megalight.parallel.host_memory import host_memory
from megalight.parallel.virtual_memory import VirtualMemory
from megalight.types import AttentionSpan, PackedSequences, Pages


class Form(NamedTuple):
    """The form of a row, or of an entry."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Pool:
    """``count`` rows or entries, one tensor on the device.

    Attributes:
        stored: ``[count, *shape]``.
        kept: a part of them, on the host.
        memory: where they lie; None: in torch's own memory.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.stored: Tensor | None = None
        self.kept: Tensor | None = None
        self.memory: VirtualMemory | None = None

    def empty(self, form: Form) -> Tensor:
        """Return memory for the whole pool at once, so that addresses stay fixed."""
        shape = (self.count, *form.shape)
        if self.memory is not None:
            return self.memory.empty(shape, form.dtype)
        return torch.empty(shape, dtype=form.dtype, device=form.device)

    def _all(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if self.stored is None:
            self.stored = self.empty(Form(shape, like.dtype, like.device))
        return self.stored


class TokenBlocks(_Pool):
    """A pool with one row per token, in the blocks of layers that see the same.

    Args:
        blocks: the blocks.
        span: what the layers see, if the blocks are of such layers alone.
    """

    def __init__(self, blocks: BlockPool | SpanBlocks, span: AttentionSpan | None) -> None:
        super().__init__((blocks.count + 1) * blocks.size)
        self.blocks, self.span = blocks, span

    @property
    def stored_blocks(self) -> Tensor:
        """``[blocks.count + 1, blocks.size, *shape]``."""
        assert self.stored is not None
        return self.stored.view(-1, self.blocks.size, *self.stored.shape[1:])

    def rows(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the pool ``[(blocks.count + 1) * blocks.size, *shape]``. The last block is a dummy."""
        return self._all(shape, like)


class SlotEntries(_Pool):
    """A pool with one entry per slot, one for each of the snapshots of ``blocks``, and a dummy."""

    def entries(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the pool ``[num_slots + blocks.snapshots + 1, *shape]``."""
        return self._all(shape, like)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy entries."""
        assert self.stored is not None
        self.stored[targets] = self.stored[sources]


class Cache:
    """The states of a model's layers for several sequences. Each sequence has its own slot and its own length.

    Every layer makes its state with ``layer.make_state(slots)``. The cache is passed as ``slots``.

    Args:
        layers: what makes the states, by name: the model's layers, or its attention modules.
        num_slots: maximum number of sequences.
        capacity: maximum number of tokens in each slot.
        blocks: the pool of blocks that hold the tokens of all slots. None: every slot has one block of ``capacity``
            tokens.
        quantized: whether keys and values, or latents, are stored in e4m3.

    Attributes:
        states: argument ``states`` of the model.
        lengths: number of stored tokens of each slot.
        dummy_slot: an entry of no sequence.
        reversible: whether a slot can forget its last tokens: all states have one row per token.
        memory: where the pools lie; None: in torch's own memory.

    Raises:
        ConfigurationError: a layer has no ``make_state``.
    """

    def __init__(
        self,
        layers: Mapping[str, Any] | nn.ModuleDict,
        num_slots: int,
        capacity: int,
        blocks: BlockPool | None = None,
        quantized: bool = False,
    ) -> None:
        self.num_slots, self.quantized = num_slots, quantized
        self.capacity = capacity
        self.blocks = blocks or BlockPool(num_slots, num_slots, capacity)
        self.dummy_slot = num_slots + self.blocks.snapshots
        self.lengths = [0] * num_slots
        self.reversible = True
        # Where the positions of a slot's next tokens are not their number: images take fewer positions than tokens.
        self._ahead = [0] * num_slots
        self._axes: int | None = None
        self._pools: list[TokenBlocks | SlotEntries] = []
        self._used: dict[BlockPool | SpanBlocks, list[int]] = {}
        self._forms: Sequence[Form | None] = ()
        self.memory: VirtualMemory | None = None
        self.states: dict[str, Any] = {}
        for name, layer in layers.items():
            if not hasattr(layer, "make_state"):
                raise ConfigurationError(
                    f"layers.{name} ({type(layer).__name__}) has no method make_state(slots), so the cache cannot keep "
                    "what it needs of earlier tokens; define it, as megalight.nn.TransformerLayer does."
                )
            self.states[name] = layer.make_state(self)  # type: ignore[operator]

    def per_token(self, span: AttentionSpan | None = None) -> TokenBlocks:
        """Make storage for one row per token, which later tokens within its span read (None: all)."""
        known = None if span is None else self.blocks.spans.get(span)
        pool = TokenBlocks(self.blocks, span) if known is None else TokenBlocks(known, span)
        self._pools.append(pool)
        return pool

    def per_sequence(self) -> SlotEntries:
        """Make storage for one entry per sequence."""
        self.reversible = False
        pool = SlotEntries(self.dummy_slot + 1)
        self._pools.append(pool)
        return pool

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
        for pool in self._pools if pairs else ():
            if isinstance(pool, SlotEntries):
                pool.copy(sources, targets)

    def begin(self, slot: int, blocks: Sequence[int]) -> None:
        """Begin a slot's sequence with full blocks of the pool, which hold its first tokens (``blocks.prefixes``).

        If the cache is not :attr:`reversible`, the state at their end must be copied to the slot before it is extended.
        """
        self.blocks.share(slot, blocks)
        self.lengths[slot] = len(blocks) * self.blocks.size

    def release(self, slot: int) -> None:
        """Forget a slot's sequence and take its blocks back. The slot's next tokens begin a new sequence."""
        # Entries of sequences stay, too: `Pages.begins` hides them from the next one.
        self.lengths[slot] = self._ahead[slot] = 0
        self.blocks.shrink(slot, 0)

    def clear(self) -> None:
        """Forget all sequences."""
        for slot in range(self.num_slots):
            self.release(slot)
        self.blocks.prefixes.clear()

    def drop(self) -> None:
        """Forget all sequences and give the memory back. :meth:`allocate` takes it again, or the next forward pass if
        it is torch's own.
        """
        self.clear()
        for pool in self._pools:
            pool.kept = None
        self.give_back()

    def give_back(self) -> None:
        """Give the memory of the device back, without a copy."""
        if self.memory is not None:
            self.memory.release()
            return
        for pool in self._pools:
            pool.stored = None

    @property
    def addresses_stay(self) -> bool:
        """Whether addresses stay while the memory is given back."""
        return self.memory is not None

    def suspend(self, keep: bool) -> None:
        """Give the memory of the device back. Keep what sequences have in it on the host, or :meth:`drop` it."""
        if not keep:
            self.drop()
            return
        self._used = {each: each.used for each in self.blocks.pools}
        for pool in self._pools:
            if pool.stored is not None:
                # Pool by pool, so that no second copy of all is on the device.
                found = pool.stored if isinstance(pool, SlotEntries) else pool.stored_blocks[self._used[pool.blocks]]
                pool.kept = host_memory(found.shape, found.dtype, found.device)
                pool.kept.copy_(found)
        self.give_back()

    @property
    def tensors(self) -> list[Tensor]:
        """All pools that have addresses on the device."""
        return [pool.stored for pool in self._pools if pool.stored is not None]

    def forms(self) -> tuple[list[Form | None], dict[AttentionSpan | None, int], int]:
        """Return the forms of all pools after a pass, the bytes of a token by what sees it, and those of a sequence.

        A pool that no layer has asked for has none.
        """
        forms: list[Form | None] = []
        tokens: dict[AttentionSpan | None, int] = {}
        entry = 0
        for pool in self._pools:
            rows = pool.stored
            forms.append(None if rows is None else Form(tuple(rows.shape[1:]), rows.dtype, rows.device))
            size = 0 if rows is None else rows[0].nbytes
            if isinstance(pool, TokenBlocks):
                tokens[pool.span] = tokens.get(pool.span, 0) + size
            else:
                entry += size
        return forms, tokens, entry

    def allocate(self, forms: Sequence[Form | None] = ()) -> None:
        """Take the memory of all pools or of none, now and not in the first pass, or again after it was given back.

        Args:
            forms: those of the pools, the first time.

        Raises:
            torch.OutOfMemoryError: the device has too little.
        """
        if self.memory is not None and self._forms:
            self.memory.restore()
            return
        self._forms = self._forms or forms
        made = [None if form is None else pool.empty(form) for pool, form in zip(self._pools, self._forms, strict=True)]
        for pool, stored in zip(self._pools, made, strict=True):
            pool.stored = stored

    def lie_in(self, memory: VirtualMemory | None) -> None:
        """Let pools that have no memory yet take it there."""
        self.memory = memory
        for pool in self._pools:
            pool.memory = memory

    def restore(self) -> None:
        """Write into new memory what :meth:`suspend` kept. Other states of sequences are zero."""
        for pool in self._pools:
            if pool.stored is None:
                continue
            if isinstance(pool, SlotEntries):
                pool.stored.zero_() if pool.kept is None else pool.stored.copy_(pool.kept)
            elif pool.kept is not None:
                pool.stored_blocks[self._used[pool.blocks]] = pool.kept.to(pool.stored.device)
            pool.kept = None

    def reserve(self, slots: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Reserve ``counts[i]`` more tokens in ``slots[i]``, as :meth:`extend`; return the lengths with them."""
        # Checked before lengths change: an error leaves the cache as it was.
        totals = [self.lengths[slot] + count for slot, count in zip(slots, counts, strict=True)]
        if max(totals) > self.capacity:
            raise DataError(
                f"a sequence would have {max(totals)} tokens and the cache has room for {self.capacity}; "
                "make the cache larger."
            )
        self.blocks.grow(dict(zip(slots, totals, strict=True)))
        for slot, total in zip(slots, totals, strict=True):
            self.lengths[slot] = total
        return totals

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
            the new tokens, with their positions in their sequences, and the pages of these.

        Raises:
            DataError: a slot would have more than ``capacity`` tokens, too few blocks are free, or positions are not
                those of the tokens.
        """
        past = [self.lengths[slot] for slot in slots]
        totals = self.reserve(slots, counts)
        new = self._describe(slots, counts, past, totals, torch.device(device))
        if axis_positions is not None:
            self._axes = len(axis_positions[0])
            for slot, total, each in zip(slots, totals, axis_positions, strict=True):
                self._ahead[slot] = int(each.max()) + 1 - total
            return new.with_axes(torch.cat(list(axis_positions), dim=1).to(device))
        if self._axes is None:
            return new
        following = new.positions + new.expand(torch.tensor([self._ahead[slot] for slot in slots], device=device))
        return new.with_axes(following.expand(self._axes, -1))

    def _describe(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        past: Sequence[int],
        totals: Sequence[int],
        device: torch.device,
    ) -> PackedSequences:
        """Describe new tokens and their pages: all numbers are known to the host, and go to the device in one copy."""
        size, sequences, tokens = self.blocks.size, len(slots), sum(counts)
        rows, number = np.asarray(slots), np.asarray(counts)
        width = self.blocks.holding(max(totals))
        offsets = np.zeros(sequences + 1, np.int32)
        np.cumsum(number, out=offsets[1:])
        sequence = np.repeat(np.arange(sequences), number)
        positions = np.arange(tokens) - (offsets[:-1] - np.asarray(past))[sequence]
        tables = [each.table for each in self.blocks.pools]
        written = [table[rows[sequence], positions // size].astype(np.int64) * size for table in tables]
        position, state_slot, cu_queries, lengths, *there = to_device_packed(
            [
                *(positions, rows.astype(np.int64), offsets, np.asarray(totals, np.int32)),
                *(block + positions % size for block in written),
                *(table[rows, :width].ravel() for table in tables),
            ],
            device,
        )
        pages = Pages(
            there[len(tables)].view(sequences, width),
            lengths,
            cu_queries,
            there[0],
            state_slot,
            size,
            tuple(counts),
            tuple(totals),
            any(past),
            exact=True,
        )
        if self.blocks.spans:
            own = zip(self.blocks.spans, there[1 : len(tables)], there[len(tables) + 1 :], strict=True)
            pages = replace(
                pages,
                spans={
                    span: replace(pages, block_table=table.view(sequences, width), write=write)
                    for span, write, table in own
                },
            )
        uniform = (sequences, counts[0]) if len({*counts}) == 1 else None
        return PackedSequences(tuple(counts), cu_queries, position, uniform, pages=pages)


ALIGNED = 16
"""Bytes of which the places of arrays in one buffer are multiples: kernels are compiled for aligned pointers apart."""


def places_of(sizes: Sequence[int]) -> list[int]:
    """Return where arrays of so many bytes begin in one buffer, and its size."""
    return [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]


class InputBuffer:
    """Integers on the device at fixed places, which one copy fills: some of 64 bits, then some of 32.

    Args:
        wide: how many numbers of 64 bits each part has.
        narrow: likewise of 32 bits.
        device: the device.

    Attributes:
        parts: the parts.
    """

    def __init__(self, wide: Sequence[int], narrow: Sequence[int], device: torch.device) -> None:
        types = [np.int64] * len(wide) + [np.int32] * len(narrow)
        sizes = [count * np.dtype(kind).itemsize for count, kind in zip([*wide, *narrow], types, strict=True)]
        self._slices = [
            (slice(place, place + size), kind)
            for place, size, kind in zip(places_of(sizes), sizes, types, strict=False)
        ]
        self._there = torch.empty(places_of(sizes)[-1], dtype=torch.uint8, device=device)
        self.parts = [
            self._there[part].view(torch.int64 if kind is np.int64 else torch.int32) for part, kind in self._slices
        ]

    @contextmanager
    def filled(self) -> Iterator[list[NDArray[Any]]]:
        """Yield the parts on the host, without values; then copy them, without a wait."""
        host = torch.empty(self._there.shape, dtype=torch.uint8, pin_memory=self._there.device.type == "cuda")
        yield [host.numpy()[part].view(kind) for part, kind in self._slices]
        self._there.copy_(host, non_blocking=True)


def to_device_packed(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to ``device`` in one piece, without making the host wait for the device."""
    places = places_of([array.nbytes for array in arrays])
    host = torch.empty(places[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    buffer = host.numpy()
    for place, array in zip(places, arrays, strict=False):
        buffer[place : place + array.nbytes].view(array.dtype)[:] = array
    there = host.to(device, non_blocking=True)
    return [
        there[place : place + array.nbytes].view(torch.int64 if array.dtype == np.int64 else torch.int32)
        for place, array in zip(places, arrays, strict=False)
    ]


# What the device knows before the host


PENDING = -1
"""Stands for a token that only the device knows yet."""


class NewestTokens:
    """Where sequences are, by slot: the device knows it before the host does.

    Without guesses, the host knows lengths by itself, and only the newest tokens are kept here.

    Args:
        entries: number of slots; the last one is of no sequence.
        device: of the model.
        num_speculative_tokens: the most that may follow a newest token.

    Attributes:
        tokens: ``[entries, 1 + num_speculative_tokens]``: the newest token, which has not run, and guesses of what
            follows it.
        before: ``[entries]``, the token before it.
        lengths: ``[entries]``, how many tokens have run and are right.
    """

    def __init__(self, entries: int, device: torch.device, num_speculative_tokens: int = 0) -> None:
        self.tokens = torch.zeros(entries, 1 + num_speculative_tokens, dtype=torch.int64, device=device)
        self.before = torch.zeros(entries, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(entries, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.tokens.device

    @property
    def num_speculative_tokens(self) -> int:
        """The most that may follow a newest token."""
        return self.tokens.shape[1] - 1

    def encode(self, slots: Sequence[int], fresh: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Return the new tokens of slots end to end, for :meth:`decode`.

        A token :data:`PENDING` is what :attr:`tokens` has at its place among those of its slot.
        """
        flat = np.array([token for ids in fresh for token in ids], np.int64)
        counts = np.array([*map(len, fresh)], np.int64)
        rows = np.repeat(np.asarray(slots, np.int64), counts)
        place = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.where(flat == PENDING, PENDING - rows * self.tokens.shape[1] - place, flat)

    def decode(self, encoded: Tensor) -> Tensor:
        """Return tokens ``[T]``. One is negative where there is none, as sampling failed or nothing was guessed."""
        known = self.tokens.view(-1)[(PENDING - encoded).clamp(min=0)]
        return torch.where(encoded < 0, known, encoded)

    def locate(self, sequences: PackedSequences, most: Tensor) -> PackedSequences:
        """Put new tokens after those that have run.

        Args:
            sequences: as if each had as many earlier tokens as it may have.
            most: ``[S]``: how many these are; negative: so many for sure.
        """
        pages = sequences.pages
        assert pages is not None
        less = torch.where(most < 0, 0, most - self.lengths[pages.state_slot])
        owner = pages.owners(sequences.num_tokens)
        positions = sequences.positions - less[owner]
        lengths = (pages.lengths - less).int()

        def moved(given: Pages) -> Pages:
            block = given.block_table[owner, positions // given.page_size].long()
            write = block * given.page_size + positions % given.page_size
            return replace(given, lengths=lengths, write=write)

        spans = {span: moved(given) for span, given in pages.spans.items()}
        return replace(sequences, positions=positions, pages=replace(moved(pages), spans=spans))

    def accept(
        self, slots: Tensor, first: Tensor, guessed: Tensor, ids: Tensor, positions: Tensor, samples: Tensor
    ) -> Tensor:
        """Keep right guesses, and the sample after them, which is the newest token now.

        Args:
            slots: ``[R]``.
            first: ``[R]``: the row of the first sample of each, which is followed by those after its guesses.
            guessed: ``[R]``: how many these are.
            ids: ``[N]``, the token of each row.
            positions: ``[N]``, its place in its sequence.
            samples: ``[N]``, the token that is sampled after it.

        Returns:
            the rows ``[R]`` of the newest tokens.
        """
        step = torch.arange(self.num_speculative_tokens, device=self.device)
        asked = step < guessed[:, None]
        row = torch.where(asked, first[:, None] + step, 0)
        after = (row + 1).clamp(max=len(ids) - 1)
        right = asked & (ids[after] >= 0) & (samples[row] == ids[after]) & (samples[after] != FAILED)
        last = first + right.long().cumprod(1).sum(1)
        self.tokens[:, 0].index_copy_(0, slots, samples[last])
        self.before.index_copy_(0, slots, ids[last])
        self.lengths.index_copy_(0, slots, positions[last] + 1)
        return last

    def put(self, slots: Sequence[int], sequences: Sequence[Sequence[int]]) -> None:
        """Let sequences be where the host knows that they are: all of their tokens but the last have run."""
        each = np.array([(slot, ids[-1], ids[-2], len(ids) - 1) for slot, ids in zip(slots, sequences, strict=True)])
        own, newest, before, lengths = to_device_packed([*np.ascontiguousarray(each.T)], self.device)
        self.tokens[:, 0].index_copy_(0, own, newest)
        self.before.index_copy_(0, own, before)
        self.lengths.index_copy_(0, own, lengths)
