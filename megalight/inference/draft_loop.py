"""The loop of a draft: it guesses tokens one after another, for several sequences at once.

What a step reads follows from the lengths of sequences on the device, so all steps are one CUDA graph: the host copies
lengths and block tables, replays, and waits once.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from megalight.inference.cache import Cache, InputBuffer
from megalight.nn.moe.dispatch import HostCounts
from megalight.ops.batch_invariant import batch_invariant_mode
from megalight.ops.jit import overlapping
from megalight.parallel.graphs.recorder import Recorder, Recording
from megalight.types import PackedSequences, Pages

log = logging.getLogger(__name__)

Chain: TypeAlias = Callable[[Tensor, Sequence[PackedSequences]], list[Tensor]]
"""Given what the first guess follows from, ``[N, ...]``, and the sequences of each later step, guesses ``[N]`` of each.

Sequences have one new token each, the newest guess.
"""


class DraftLoop:
    """Runs the loop of a draft.

    Args:
        cache: where the draft keeps keys and values.
        guesses: number of guesses of a recorded loop.
        chain: the loop.
        form: ``[0, ...]``, like what the first guesses follow from.
    """

    def __init__(self, cache: Cache, guesses: int, chain: Chain, form: Tensor) -> None:
        self._cache, self._guesses, self._chain, self._form = cache, guesses, chain, form
        self._recorder: Recorder | None = None
        self._sizes: list[int] = []
        self._graphs: dict[int, _Graph] = {}

    def record_with(self, recorder: Recorder, sizes: Sequence[int]) -> None:
        """Record loops of these numbers of sequences when they are first needed."""
        self._recorder, self._sizes = recorder, sorted(sizes)

    def create(self) -> None:
        """Record them now."""
        for size in self._sizes[::-1]:
            self._graph(size)

    def drop(self) -> None:
        """Free the graphs, whose pools are given back."""
        for graph in self._graphs.values():
            graph.recording.drop()
        self._graphs.clear()

    def run(self, slots: Sequence[int], counts: Sequence[int], first: Tensor) -> list[list[int]]:
        """Return ``counts[i]`` guesses that follow the tokens of ``slots[i]``, whose lengths do not change.

        Args:
            slots: slots of the cache, which must have room for all guesses but the last of each.
            counts: at least 1.
            first: ``[n, ...]``, what the first guesses follow from.
        """
        cache, lengths = self._cache, [self._cache.lengths[slot] for slot in slots]
        cache.reserve(slots, [count - 1 for count in counts])
        graph = self._graph(len(slots))
        if graph is None:
            inputs = _Inputs(cache, len(slots), max(counts), max(lengths) + max(counts), False, first.device)
            inputs.fill(slots, lengths, counts)
            found = torch.stack(self._chain(first, inputs.sequences()), 1)
        else:
            graph.inputs.fill(slots, lengths, counts)
            graph.first[: len(slots)].copy_(first)
            graph.recording.replay()
            found = graph.found[: len(slots)]
        for slot, length in zip(slots, lengths, strict=True):
            cache.truncate(slot, length)
        width = found.shape[1]
        rows = HostCounts(found.flatten()).wait(*[width] * len(slots))
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def _graph(self, count: int) -> _Graph | None:
        """Return the smallest loop that has room for so many sequences."""
        place = bisect_left(self._sizes, count)
        if self._recorder is None or place == len(self._sizes):
            return None
        size = self._sizes[place]
        if size not in self._graphs:
            self._recorder.enter()
            try:
                self._graphs[size] = self._record(self._recorder, size)
            except Exception:
                self._sizes = []
                log.warning("the loop of a draft cannot be recorded and runs without a graph", exc_info=True)
            finally:
                self._recorder.leave()
        return self._graphs.get(size)

    def _record(self, recorder: Recorder, size: int) -> _Graph:
        device = self._form.device
        inputs = _Inputs(self._cache, size, self._guesses, self._cache.capacity, True, device)
        inputs.fill([], [], [])
        begin = self._form.new_zeros(size, *self._form.shape[1:])
        found = torch.zeros(size, self._guesses, dtype=torch.int64, device=device)

        def run() -> None:
            for place, guesses in enumerate(self._chain(begin, inputs.sequences())):
                found[:, place].copy_(guesses)

        # A guess may be anything.
        with overlapping(device), batch_invariant_mode(False):
            run()  # kernels are compiled
            return _Graph(inputs, begin, found, recorder.record(run, pool="draft", settle=False))


@dataclass(frozen=True)
class _Graph:
    """A recorded loop of ``N`` sequences.

    Attributes:
        inputs: where they lie.
        first: ``[N, ...]``, what the first guesses follow from.
        found: ``[N, k]``, the guesses.
        recording: the loop.
    """

    inputs: _Inputs
    first: Tensor
    found: Tensor
    recording: Recording[None]


class _Inputs:
    """Lengths, numbers of guesses and block tables of ``N`` sequences, on the device.

    Args:
        cache: where they lie.
        count: ``N``.
        guesses: number of guesses of the loop.
        bound: at least the number of stored tokens of each, with all guesses but the last.
        recorded: whether what reads them is recorded.
        device: of the draft.
    """

    def __init__(
        self, cache: Cache, count: int, guesses: int, bound: int, recorded: bool, device: torch.device
    ) -> None:
        self._cache, self._count, self._guesses, self._recorded = cache, count, guesses, recorded
        self._bound = min(bound, cache.capacity)
        width = min(cache.blocks.holding(self._bound), cache.blocks.count)
        self._buffer = InputBuffer([count] * 3, [count + 1, *[count * width] * len(cache.blocks.pools)], device)
        self._lengths, self._counts, self._slots, self._offsets, *self._tables = self._buffer.parts

    def fill(self, slots: Sequence[int], lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Copy sequences to the device. Others are padding, which has one token and no guesses of its own."""
        with self._buffer.filled() as (there, own, places, offsets, *tables):
            there[:], own[:], places[:] = 1, 0, self._cache.dummy_slot
            there[: len(slots)], own[: len(slots)], places[: len(slots)] = lengths, counts, slots
            offsets[:] = np.arange(len(offsets))
            for blocks, table in zip(self._cache.blocks.pools, tables, strict=True):
                each = table.reshape(self._count, -1)
                each[:] = blocks.count
                known = blocks.table[np.asarray(slots, np.int64), : each.shape[1]]
                each[: len(slots), : known.shape[1]] = known

    def sequences(self) -> list[PackedSequences]:
        """Return the sequences of each step after the first, whose new token is the newest guess."""
        size, steps = self._cache.blocks.size, torch.arange(1, self._guesses, device=self._lengths.device)[:, None]
        # Guesses that nobody asked for are written to a dummy block, and lie anywhere.
        positions = (self._lengths + steps - 1).clamp(max=self._bound - 1)
        wanted, lengths = steps < self._counts, (positions + 1).int()
        pages: list[list[Pages]] = []
        for blocks, flat in zip(self._cache.blocks.pools, self._tables, strict=True):
            table = flat.view(self._count, -1)
            block = table.gather(1, (positions // size).clamp(max=table.shape[1] - 1).T).T
            write = torch.where(wanted, block.long() * size + positions % size, blocks.count * size)
            pages.append([self._pages(table, *each) for each in zip(lengths, write, strict=True)])
        spans = self._cache.blocks.spans
        return [
            PackedSequences(
                (1,) * self._count,
                self._offsets,
                place,
                (self._count, 1),
                pages=replace(own, spans=dict(zip(spans, others, strict=True))),
            )
            for place, (own, *others) in zip(positions, zip(*pages, strict=True), strict=True)
        ]

    def _pages(self, table: Tensor, lengths: Tensor, write: Tensor) -> Pages:
        return Pages(
            table,
            lengths,
            self._offsets,
            write,
            self._slots,
            self._cache.blocks.size,
            (1,) * self._count,
            (self._bound,) * self._count,
            continued=True,
            recorded=self._recorded,
        )
