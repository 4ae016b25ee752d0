"""Time the steps of a run, and then profile one of several steps in a row."""

from __future__ import annotations

import gc
import os
import platform
import resource
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.breakdown import breakdown
from benchmarks.step import Step
from megalight.parallel.peers.memory import held


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def device_name(step: Step) -> str:
    return (
        torch.cuda.get_device_name() if step.device == "cuda" else f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    )


def forget(step: Step) -> None:
    """Free memory for the next run, and restart the measurement of its peak."""
    gc.collect()
    if step.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def leaving_nothing(step: Step) -> Iterator[None]:
    """Free the memory of tensors that come to be inside, also of those that a package still holds afterwards.

    Otherwise the next run has less memory than it would have alone.
    """
    before = {id(tensor): weakref.ref(tensor) for tensor in _tensors(step)}
    try:
        yield
    finally:
        forget(step)
        found = _tensors(step)
        old = [tensor for tensor in found if id(tensor) in before and before[id(tensor)]() is tensor]
        kept = {tensor.untyped_storage().data_ptr() for tensor in old}
        for tensor in found:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in kept and storage.resizable():
                storage.resize_(0)
        del found, old
        forget(step)


def _tensors(step: Step) -> list[Tensor]:
    """Return all tensors on the device of a step that Python knows."""
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return [tensor for tensor in found if tensor.device.type == step.device and tensor.layout == torch.strided]


def peak_gib(step: Step, symmetric: int = 0) -> float:
    """Return the peak of memory since :func:`forget`. On CPU, the peak of the process since its start.

    Args:
        symmetric: the most bytes of symmetric memory at a time, which torch's allocator does not count.
    """
    if step.device == "cuda":
        return (torch.cuda.max_memory_allocated() + max(symmetric, held())) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def mark(step: Step) -> Any:
    """Mark a point in time on the device; on CPU, on the host."""
    if step.device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(before: Any, after: Any) -> float:
    """Return the seconds between two marks."""
    return float(after - before if isinstance(after, float) else before.elapsed_time(after) / 1e3)


def random_rows(step: Step, count: int, seed: int) -> torch.Tensor:
    """Return random tokens ``[count, seq + 1]``."""
    return torch.randint(0, step.vocab, (count, step.seq + 1), generator=torch.Generator().manual_seed(seed))


ALONE = 3
"""Number of steps that are timed one by one, after the others."""
FLAG = "heaviside"
"""Part of the name of the operator that marks the ends of steps in the record of the profiler."""
QUIET = 10.0
"""Seconds without a word after which the first rank says which step is done."""


class Meter:
    """Counts a run's steps: call :meth:`start` before the first and :meth:`tick` after each of :attr:`total`.

    Timed steps run in a row as in training, where the host does not wait for the end of a step. On a GPU, the seconds
    of a step are the time between two events, each recorded when the host has finished a step. Then follow
    :data:`ALONE` steps that start and end with an idle device (:meth:`alone`). They do not overlap with each other, and
    their first kernels wait for the host.

    The profiled step is one in a row, too: it starts where the main stream has done the step before, under whose last
    messages it runs, and ends where the main stream has done this one. :data:`FLAG`, an operator that no model has,
    marks both places in the record.

    Call :meth:`close` last, while the process group exists. Then ``ranks`` has each rank's peak in GiB and breakdown.

    Args:
        step: has the numbers of warm-up steps and of timed steps.
        profiled: whether to run three more steps and profile the last one.
        table: file for a table of the kernels in the profiled step.
    """

    def __init__(self, step: Step, profiled: bool = False, table: str | None = None) -> None:
        self.step = step
        self.together = step.warmup + step.steps
        self.total = self.together + ALONE + 3 * profiled
        self.table = table
        self.ranks: list[tuple[float, dict[str, Any]]] = []
        self._ticks = 0
        self._held = 0
        self._marks: list[Any] = []
        self._readings: list[float] = []
        self._profiler: Any = None
        self._flags: list[Any] = []
        self._began = self._said = time.perf_counter()
        if profiled:
            activity = torch.profiler.ProfilerActivity
            self._profiler = torch.profiler.profile(
                activities=[activity.CUDA if step.device == "cuda" else activity.CPU],
                schedule=torch.profiler.schedule(wait=self.total - 3, warmup=1, active=2),
            )

    def start(self) -> None:
        self._flag()  # the first call of an operator takes long
        synchronize()
        self._began = self._said = time.perf_counter()
        if self._profiler:
            self._profiler.start()

    def tick(self) -> None:
        self._ticks += 1
        self._held = max(self._held, held())  # that of quantized values is freed when training ends
        self._say()
        if self.step.warmup <= self._ticks <= self.together:
            self._marks.append(mark(self.step))
        if self._profiler and self._ticks >= self.total - 1:
            # Between the two recorded steps nothing waits for the device.
            self._flags.append(mark(self.step))
            self._flag()
        elif self._ticks >= self.together:
            synchronize()
            self._readings.append(time.perf_counter())
        if self._profiler and self._ticks <= self.total:
            if self._ticks == self.total:
                synchronize()
            self._profiler.step()
            if self.together <= self._ticks < self.total - 1:
                self._readings[-1] = time.perf_counter()  # do not count the start of the profiler as part of a step

    def _flag(self) -> None:
        """Leave a flag in the record: the main stream gets here when a step is done on it."""
        one = torch.ones(1, device=self.step.device)
        torch.heaviside(one, one)

    def _say(self) -> None:
        """Tell how far the run is, so that one that is slow, or is ended, can be told from one that hangs."""
        now = time.perf_counter()
        if now - self._said >= QUIET and os.environ.get("RANK", "0") == "0":
            self._said = now
            print(f"step {self._ticks} of {self.total}, {now - self._began:.0f} s after the start", flush=True)

    def seconds(self) -> list[float]:
        """Return the seconds of each timed step."""
        return [between(before, after) for before, after in pairwise(self._marks)]

    def alone(self) -> list[float]:
        """Return the seconds of each step that started and ended with an idle device."""
        return [after - before for before, after in pairwise(self._readings[: ALONE + 1])]

    def close(self) -> None:
        """Gather the results of all ranks. A second call does nothing."""
        if self.ranks:
            return
        own = peak_gib(self.step, self._held), self._breakdown()
        if torch.distributed.is_initialized():
            everyone: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, own)
            self.ranks = everyone
        else:
            self.ranks = [own]

    def _breakdown(self) -> dict[str, Any]:
        """Return the breakdown of the profiled step, or an empty one without profiling."""
        if not self._profiler:
            return {}
        self._profiler.stop()
        if self.table:
            Path(self.table).write_text(self._profiler.key_averages().table(row_limit=40))
        return breakdown(self._profiler, between(*self._flags), self.step.device, FLAG)
