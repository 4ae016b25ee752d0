"""Decide by measurement whether training steps run faster as CUDA graphs: ``CUDAGraph(scope="auto")``."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from megalight.parallel.graphs.iteration import IterationGraphs
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.step import Passes
from megalight.strategies.micro_batches import DeviceMemory, Usage

SETTLING = 3
"""First steps of a way to run that are not timed: they load kernels, allocate, or record."""
TIMED = 5
"""Number of steps of each way whose median counts."""
PATIENCE = 50
"""Steps of the second way after which the trial ends even if too few were replayed."""
LAUNCHES = 0.8
"""Share of a step that launches take at least, if launches limit it."""
GAIN = 0.97
"""Largest time of a replayed step, as a share of an eager one, for which recording is worth its memory."""


@dataclass(frozen=True)
class StepReading:
    """One measured step.

    Attributes:
        launched: seconds until the host had launched everything.
        done: seconds until the device had finished.
        memory: memory of the step.
    """

    launched: float
    done: float
    memory: Usage


class Probe(Protocol):
    """Measures a step."""

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, StepReading]:
        """Return the result of ``run``, and the reading."""


class DeviceProbe:
    """Measures on a GPU. It waits for the device before and after, so only a few steps are measured."""

    def __init__(self, device: torch.device, mesh: ParallelMesh) -> None:
        self.device = device
        self.memory = DeviceMemory(device, mesh)

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, StepReading]:
        """Return the result of ``run``, and the reading."""
        # Work of earlier steps must not count.
        torch.cuda.synchronize(self.device)
        end = self.memory.measure(0)
        begun = time.perf_counter()
        result = run()
        launched = time.perf_counter()
        torch.cuda.synchronize(self.device)
        done = time.perf_counter()
        return result, StepReading(launched - begun, done - begun, end())


class Trial:
    """Runs steps eagerly, then from graphs, measures both, and stays with the faster way.

    Graphs are tried only if launches limit the eager steps, or layers hide more in recorded ones, and if the device has
    room for a second set of activations. All ranks decide by the same figures.

    Attributes:
        verdict: the decision, in words. None: it is still open.

    Args:
        graphs: records and replays.
        probe: measures steps.
        agree: integers of all ranks -> the largest of each.
        tell: called with the verdict.
        gains: whether layers hide more communication in recorded steps; all ranks ask together.
    """

    def __init__(
        self,
        graphs: IterationGraphs,
        probe: Probe,
        agree: Callable[[list[int]], list[int]],
        tell: Callable[[str], None],
        gains: Callable[[], bool],
    ) -> None:
        self.graphs = graphs
        self.probe = probe
        self.agree = agree
        self.tell = tell
        self.gains = gains
        self.verdict: str | None = None
        self._kind: Hashable = None
        self._steps = 0
        self._eager: dict[Hashable, list[StepReading]] = {}
        self._replayed: list[StepReading] = []
        self._trying = False

    def __call__(self, key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Any:
        """Run a step."""
        if self.graphs.off:
            if self.verdict is None:
                self._end("they cannot be recorded")
            return passes(micro_batches)
        if self.verdict is not None:
            return self.graphs(key, micro_batches, passes)
        self._steps += 1
        if self._trying:
            return self._replay(key, micro_batches, passes)
        if self._steps <= SETTLING:
            return passes(micro_batches)
        result, reading = self.probe(lambda: passes(micro_batches))
        # Steps that only accumulate gradients are of another kind than those that reduce them.
        readings = self._eager.setdefault(key, [])
        readings.append(reading)
        if len(readings) == TIMED:
            self._kind = key
            self._look(readings)
        return result

    def _look(self, readings: list[StepReading]) -> None:
        """Decide whether to try graphs."""
        launched, done = self._agreed(readings)
        gains = self.agree([int(self.gains())]) == [1]
        usage = readings[-1].memory
        needed = usage.peak - usage.before
        if launched < LAUNCHES * done and not gains:
            self._end(f"the device is busy, launches take {launched * 1e3:.1f} of {done * 1e3:.1f} ms")
        # The graph keeps its activations, and evaluation needs as much again at most.
        elif usage.peak + needed > usage.limit:
            free = (usage.limit - usage.peak) / 2**30
            self._end(f"a graph would keep {needed / 2**30:.1f} GiB, and {free:.1f} GiB are free")
        else:
            self._trying, self._steps = True, 0
            self.graphs.prepare()

    def _replay(self, key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Any:
        before = self.graphs.replays
        result, reading = self.probe(lambda: self.graphs(key, micro_batches, passes))
        # Replays are the same on all ranks, unlike recordings: a rank may have recorded this form before.
        if self.graphs.replays > before and key == self._kind:
            self._replayed.append(reading)
        if len(self._replayed) == SETTLING + TIMED:
            self._compare()
        elif self._steps == PATIENCE and not self.graphs.off:
            self._end(f"only {len(self._replayed)} of {PATIENCE} steps had a form that was seen before")
        return result

    def _compare(self) -> None:
        _, eager = self._agreed(self._eager[self._kind])
        _, replayed = self._agreed(self._replayed[SETTLING:])
        told = f"{replayed * 1e3:.1f} ms for forward and backward, {eager * 1e3:.1f} ms without"
        if replayed > GAIN * eager:
            self._end(told)
            return
        self.verdict = told
        self.tell(f"steps are replayed from CUDA graphs: {told}")

    def _agreed(self, readings: list[StepReading]) -> tuple[float, float]:
        """Return the medians of the slowest rank."""
        own = [median(reading.launched for reading in readings), median(reading.done for reading in readings)]
        launched, done = self.agree([round(1e9 * seconds) for seconds in own])
        return launched / 1e9, done / 1e9

    def _end(self, why: str) -> None:
        self.verdict = why
        self.graphs.close()
        self.tell(f"steps run without CUDA graphs: {why}")
