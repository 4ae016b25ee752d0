"""CUDA graphs of decode steps: one for each of several numbers of sequences, all in one memory pool.

A decode step runs the newest token of each sequence. Its launches depend on the number of sequences alone: tokens,
positions, lengths and block tables lie in one buffer on the device, which one copy fills before each replay. Sequences
that a graph has room for beyond those of the step read and write a dummy block.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalight.errors import integer
from megalight.inference.cache import Cache, places_of
from megalight.inference.parallel import GenerativeModel, ParallelGPT, evaluating
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.hf import HFConfig, HFModel
from megalight.ops.common import HALF
from megalight.ops.jit import overlapping
from megalight.parallel.graphs.recorder import CUDARecorder, Recorder, Recording
from megalight.types import PackedSequences, Pages

log = logging.getLogger(__name__)

PENDING = -1
"""Stands for a token that only the device knows yet."""


def graph_sizes(largest: int, count: int) -> list[int]:
    """Return for how many sequences steps are recorded, the largest first: about ``count`` sizes, and three small ones.

    The list is that of Megatron's dynamic engine, multiples of a multiple of 8; it has none of less than 8 sequences.
    """
    step = -(-max(1, largest // count) // 8) * 8
    return sorted({*range(step, largest, step), largest, *(size for size in (1, 2, 4) if size < largest)}, reverse=True)


class DecodeGraphs:
    """The recorded decode steps of a model.

    Args:
        model: a whole model.
        cache: its cache. Its pools must keep their addresses until :meth:`drop`.
        newest: ``[num_slots]`` int64: the token of each slot that the host gives as :data:`PENDING`.
        sizes: numbers of sequences.
        recorder: makes the recordings.

    Attributes:
        uses: how often each size was replayed.
    """

    def __init__(
        self, model: GPT | HFModel, cache: Cache, newest: Tensor, sizes: Sequence[int], recorder: Recorder
    ) -> None:
        self._model, self._cache, self._newest, self._recorder = model, cache, newest, recorder
        self.sizes = sorted(sizes, reverse=True)
        self.uses: Counter[int] = Counter()
        self._steps: dict[int, _Step] = {}
        self._failed = False

    @classmethod
    def of(cls, model: GenerativeModel, cache: Cache, newest: Tensor, count: int) -> DecodeGraphs | None:
        """Return the graphs of a model; None: its steps are not recorded.

        Recorded are whole models of text on a GPU in half precision: otherwise attention reads all that a cache has
        room for. Experts get other numbers of tokens in each step.

        Raises:
            ConfigurationError: ``count`` is no integer of at least 0.
        """
        if not integer("cuda_graphs", count, 0) or newest.device.type != "cuda" or isinstance(model, ParallelGPT):
            return None
        config: object = model.config
        # Steps of a model of transformers whose code waits for the device (experts) fail to record, and run without.
        text = isinstance(config, HFConfig) or (isinstance(config, GPTConfig) and config.moe is None)
        if not text or next(model.parameters()).dtype not in HALF:
            return None
        return cls(model, cache, newest, graph_sizes(cache.num_slots, count), CUDARecorder(newest.device))

    def create(self) -> None:
        """Record all steps now, the largest first; otherwise each is recorded when it is first needed."""
        for size in self.sizes:
            self._step(size)

    def drop(self) -> None:
        """Free the graphs, whose pools are given back."""
        for step in self._steps.values():
            step.recording.drop()
        self._steps.clear()

    def run(self, slots: Sequence[int], tokens: Sequence[int]) -> Tensor | None:
        """Run a token of each slot; return logits ``[n, V]`` until the next step; None: there is no graph for it.

        Raises:
            DataError: see :meth:`Cache.extend`.
        """
        size = next((size for size in self.sizes[::-1] if size >= len(slots)), None)
        if size is None or (step := self._step(size)) is None:
            return None
        totals = self._cache.reserve(slots, [1] * len(slots))
        step.fill(self._cache, slots, totals, tokens)
        step.recording.replay()
        self.uses[size] += 1
        return step.recording.result[: len(slots)]

    def _step(self, size: int) -> _Step | None:
        if size not in self._steps and not self._failed:
            self._recorder.enter()
            try:
                self._steps[size] = _Step(self._model, self._cache, self._newest, size, self._recorder)
            except Exception:
                self._failed = True
                log.warning(
                    "a decode step of %d sequences cannot be recorded; steps run without graphs", size, exc_info=True
                )
            finally:
                self._recorder.leave()
        return self._steps.get(size)


class _Step:
    """One recorded step, with the buffer of its inputs.

    It holds positions, rows to write, slots and tokens in 64 bits, then offsets, lengths and the block table in 32.
    """

    recording: Recording[Tensor]

    def __init__(self, model: GPT | HFModel, cache: Cache, newest: Tensor, size: int, recorder: Recorder) -> None:
        self.size = size
        counts = [*[size] * 4, size + 1, size, size * cache.blocks.holding(cache.capacity)]
        self.bytes = [count * (8 if place < 4 else 4) for place, count in enumerate(counts)]
        self.places = places_of(self.bytes)
        self.buffer = torch.zeros(self.places[-1], dtype=torch.uint8, device=newest.device)
        self.fill(cache, [], [], [])
        positions, write, slots, tokens, offsets, lengths, table = (
            self.buffer[place : place + count].view(torch.int64 if number < 4 else torch.int32)
            for number, (place, count) in enumerate(zip(self.places, self.bytes, strict=False))
        )
        ones, bounds = (1,) * size, (cache.capacity,) * size

        def run() -> Tensor:
            # Where sampling failed there is no token, and the host will drop what follows.
            ids = torch.where(tokens == PENDING, newest[slots].clamp(min=0), tokens)
            # Anew for each run, as they remember what follows from them.
            pages = Pages(table.view(size, -1), lengths, offsets, write, slots, cache.blocks.size, ones, bounds, True)
            sequences = PackedSequences(ones, offsets, positions, (size, 1), pages=pages)
            logits = model(ids, sequences, states=cache.states).logits
            assert isinstance(logits, Tensor)
            return logits

        with torch.no_grad(), evaluating(model), overlapping(newest.device):
            run()  # kernels are compiled, and pools allocated
            self.recording = recorder.record(run, pool="decode", settle=False)

    def fill(self, cache: Cache, slots: Sequence[int], totals: Sequence[int], tokens: Sequence[int]) -> None:
        """Copy a step's sequences to the device; the others are one token each, in the dummy block."""
        count, blocks = len(slots), cache.blocks
        host = torch.empty(self.buffer.shape, dtype=torch.uint8, pin_memory=self.buffer.device.type == "cuda")
        array = host.numpy()
        positions, write, own, ids, offsets, lengths, table = (
            array[place : place + size].view(np.int64 if number < 4 else np.int32)
            for number, (place, size) in enumerate(zip(self.places, self.bytes, strict=False))
        )
        table = table.reshape(self.size, -1)
        offsets[:] = np.arange(self.size + 1)
        positions[count:], write[count:], own[count:], ids[count:] = 0, blocks.count * blocks.size, cache.dummy_slot, 0
        lengths[count:], table[:] = 1, blocks.count
        if count:
            rows, lengths[:count] = np.asarray(slots), totals
            positions[:count] = at = np.asarray(totals) - 1
            write[:count] = blocks.table[rows, at // blocks.size].astype(np.int64) * blocks.size + at % blocks.size
            own[:count], ids[:count] = rows, tokens
            known = blocks.table[rows, : table.shape[1]]
            table[:count, : known.shape[1]] = known
        self.buffer.copy_(host, non_blocking=True)
