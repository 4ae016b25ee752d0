"""The loop of a draft: it guesses tokens one after another, for several sequences at once.

What a step reads follows from the lengths of sequences on the device, so all steps are one CUDA graph, and the host
need not know what the base has accepted: it copies block tables and replays.
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

from megalight.inference.cache import Cache, InputBuffer, NewestTokens
from megalight.ops.batch_invariant import batch_invariant_mode
from megalight.ops.jit import overlapping
from megalight.parallel.graphs.recorder import Recorder, Recording
from megalight.types import PackedSequences, Pages

log = logging.getLogger(__name__)

Chain: TypeAlias = Callable[[Tensor, Sequence[PackedSequences]], list[Tensor]]
"""Given slots ``[N]`` and the sequences of each step, guesses ``[N]`` of each.

Sequences of a step have one new token each, the newest guess. Those of a draft that reads two tokens again come first.
"""


class DraftLoop:
    """Runs the loop of a draft.

    Args:
        cache: where the draft keeps keys and values.
        newest: where sequences are.
        num_speculative_tokens: number of guesses of a recorded loop.
        chain: the loop.
        again: whether the first step reads the newest token and the one before it. Otherwise the first guess follows
            from what the base has read.
    """

    def __init__(
        self, cache: Cache, newest: NewestTokens, num_speculative_tokens: int, chain: Chain, again: bool
    ) -> None:
        self._cache, self._newest, self._guesses, self._chain, self._again = (
            cache,
            newest,
            num_speculative_tokens,
            chain,
            again,
        )
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

    def run(self, slots: Sequence[int], counts: Sequence[int], longest: int) -> Tensor:
        """Return guesses ``[n, k]``; row ``i`` has ``counts[i]`` that follow the newest token of ``slots[i]``.

        Args:
            slots: slots of the cache, which have blocks for all guesses but the last of each.
            counts: at least 1.
            longest: no sequence has more tokens before its newest one.
        """
        graph = self._graph(len(slots))
        if graph is None:
            most = max(counts)
            inputs = _Inputs(self._cache, self._newest, len(slots), most, longest + most, False)
            inputs.fill(slots, counts)
            return torch.stack(self._chain(inputs.slots, inputs.sequences(self._again)), 1)
        graph.inputs.fill(slots, counts)
        graph.recording.replay()
        return graph.found[: len(slots)]

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
        inputs = _Inputs(self._cache, self._newest, size, self._guesses, self._cache.capacity, True)
        inputs.fill([], [])
        found = torch.zeros(size, self._guesses, dtype=torch.int64, device=self._newest.device)

        def run() -> None:
            for place, guesses in enumerate(self._chain(inputs.slots, inputs.sequences(self._again))):
                found[:, place].copy_(guesses)

        # A guess may be anything.
        with overlapping(found.device), batch_invariant_mode(False):
            run()  # kernels are compiled
            return _Graph(inputs, found, recorder.record(run, pool="draft", settle=False))


@dataclass(frozen=True)
class _Graph:
    """A recorded loop of ``N`` sequences.

    Attributes:
        inputs: where they lie.
        found: ``[N, k]``, the guesses.
        recording: the loop.
    """

    inputs: _Inputs
    found: Tensor
    recording: Recording[None]


class _Inputs:
    """Slots, numbers of guesses and block tables of ``N`` sequences, on the device.

    Args:
        cache: where they lie.
        newest: where they are.
        count: ``N``.
        num_speculative_tokens: number of guesses of the loop.
        bound: at least the number of stored tokens of each, with all guesses but the last.
        recorded: whether what reads them is recorded.

    Attributes:
        slots: ``[N]``.
    """

    def __init__(
        self, cache: Cache, newest: NewestTokens, count: int, num_speculative_tokens: int, bound: int, recorded: bool
    ) -> None:
        self._cache, self._newest, self._count, self._guesses, self._recorded = (
            cache,
            newest,
            count,
            num_speculative_tokens,
            recorded,
        )
        self._bound = min(bound, cache.capacity)
        width = min(cache.blocks.holding(self._bound), cache.blocks.count)
        self._buffer = InputBuffer([count] * 2, [count * width] * len(cache.blocks.pools), newest.device)
        self.slots, self._counts, *self._tables = self._buffer.parts

    def fill(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Copy sequences to the device. Others are padding, which has no guesses of its own."""
        with self._buffer.filled() as (places, own, *tables):
            places[:], own[:] = len(self._newest.lengths) - 1, 0
            places[: len(slots)], own[: len(slots)] = slots, counts
            for blocks, table in zip(self._cache.blocks.pools, tables, strict=True):
                each = table.reshape(self._count, -1)
                each[:] = blocks.count
                known = blocks.table[np.asarray(slots, np.int64), : each.shape[1]]
                each[: len(slots), : known.shape[1]] = known

    def sequences(self, again: bool) -> list[PackedSequences]:
        """Return the sequences of each step.

        Args:
            again: begin with a step that reads two tokens, the newest one and that before it.
        """
        lengths, device = self._newest.lengths[self.slots, None], self._newest.device
        first = [self._step(lengths + torch.arange(-1, 1, device=device), self._counts > 0)] if again else []
        return first + [
            self._step(lengths + (step - 1 + again), self._counts > step) for step in range(1, self._guesses)
        ]

    def _step(self, places: Tensor, wanted: Tensor) -> PackedSequences:
        """Describe new tokens at ``places [N, n]``. Those of sequences that are not wanted may lie anywhere."""
        size, each = self._cache.blocks.size, places.shape[1]
        # They are written to a dummy block.
        positions = places.clamp(0, self._bound - 1)
        lengths = (positions[:, -1] + 1).int()
        offsets = torch.arange(0, self._count * each + 1, each, dtype=torch.int32, device=lengths.device)
        pages: list[Pages] = []
        for blocks, flat in zip(self._cache.blocks.pools, self._tables, strict=True):
            table = flat.view(self._count, -1)
            block = table.gather(1, (positions // size).clamp(max=table.shape[1] - 1))
            write = torch.where(wanted[:, None], block.long() * size + positions % size, blocks.count * size)
            pages.append(self._pages(table, lengths, offsets, write.flatten(), each))
        own, *others = pages
        return PackedSequences(
            (each,) * self._count,
            offsets,
            positions.flatten(),
            (self._count, each),
            pages=replace(own, spans=dict(zip(self._cache.blocks.spans, others, strict=True))),
        )

    def _pages(self, table: Tensor, lengths: Tensor, offsets: Tensor, write: Tensor, each: int) -> Pages:
        return Pages(
            table,
            lengths,
            offsets,
            write,
            self.slots,
            self._cache.blocks.size,
            (each,) * self._count,
            (self._bound,) * self._count,
            continued=True,
            recorded=self._recorded,
        )
