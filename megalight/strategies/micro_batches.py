"""The number of samples per micro-batch: given, or found by measuring the memory of the first steps.

The search never runs out of memory on purpose: ranks that fail inside a collective would leave the others waiting. The
first steps are real steps, whose results do not depend on how the batch is divided. They begin with one sample. Each
step measures its memory, and the next one takes as many samples as are sure to fit, at most twice as many. Checkpoints
keep the number and its memory. A run that resumes takes the number if that memory fits beside what the run holds then:
its GPU may be smaller, or hold more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from megalight.errors import ConfigurationError
from megalight.parallel.degrees import check_measured
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.peers.memory import allocated, held, peak_allocated

AUTO: Literal["auto"] = "auto"
SHARE = 0.9
"""Fraction of the free memory that may be used: the allocator's blocks do not fit together without gaps."""

WARM_UP = 1
"""Updates before steps are measured: the optimizer's state and workspaces of libraries appear in the first. A step that
is skipped, as its gradients overflowed or there are none, makes no state."""


@dataclass(frozen=True)
class Usage:
    """Memory of one training step in bytes, the largest of all ranks.

    Attributes:
        samples: samples of a rank in the step, the most of all ranks.
        before: allocated before the step: weights, gradients, optimizer state.
        peak: allocated at most.
        limit: what may be allocated, the smallest of all ranks.
    """

    samples: int
    before: int
    peak: int
    limit: int


class Memory(Protocol):
    """Measures a device."""

    def measure(self, samples: int) -> Callable[[], Usage]:
        """Begin to measure a step on this rank's ``samples``; the returned function ends it."""


class DeviceMemory:
    """Measures a GPU by counts of the host, so that nothing waits for the device.

    Raises:
        ConfigurationError: the device is a CPU.
    """

    def __init__(self, device: torch.device, mesh: ParallelMesh) -> None:
        check_measured(device.type)
        self.device = device
        self.mesh = mesh

    def measure(self, samples: int) -> Callable[[], Usage]:
        """Begin to measure. Ending it is a collective over all ranks, which then go on with equal figures."""
        # Peaks of earlier steps, and of the search itself, must not count.
        torch.cuda.reset_peak_memory_stats(self.device)
        before = allocated(self.device)

        def end() -> Usage:
            free, total = torch.cuda.mem_get_info(self.device)
            allowed = total * torch.cuda.get_per_process_memory_fraction(self.device)
            # Without what other processes hold. Symmetric memory is in `before` and in the peak, and so in the room.
            room = min(free + torch.cuda.memory_reserved(self.device), allowed) + held()
            # Negated, so that one MAX gives the most memory in use and the smallest limit.
            figures = [samples, before, peak_allocated(self.device), -SHARE * room]
            worst = torch.tensor(figures, dtype=torch.float64, device=self.device)
            if self.mesh.world_size > 1:
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            most, start, peak, limit = worst.tolist()
            return Usage(int(most), int(start), int(peak), int(-limit))

        return end


@dataclass(frozen=True)
class FoundSize:
    """A number of samples that was found, as checkpoints keep it.

    Attributes:
        size: the number.
        held: bytes that were allocated before its step, the most of all ranks.
        used: bytes that its step took beside these.
    """

    size: int
    held: int
    used: int


class MicroBatchSize:
    """The number of samples per micro-batch.

    Args:
        size: the number. None: the whole batch.
        memory: measures steps, to find the number; ``size`` is then where the search begins. None: it is given.
        saved: what the checkpoint has from which this run resumes.

    Attributes:
        size: the number now.
        result: what the search has found, for checkpoints. None: nothing yet, or there is no search.
    """

    def __init__(self, size: int | None, memory: Memory | None = None, saved: FoundSize | None = None) -> None:
        self.size = size
        self.result = saved
        self._memory = memory
        self._updates = 0

    @property
    def found(self) -> bool:
        """Whether the number will stay."""
        return self._memory is None

    def resumed(self) -> None:
        """Take the saved number if it fits. Called on all ranks together, when the optimizer's state is loaded."""
        if self._memory is None or self.result is None:
            return
        saved, now = self.result, self._memory.measure(0)()
        need = max(saved.held, now.before) + saved.used
        if need <= now.limit:
            self.size, self._memory = saved.size, None
            rank_zero_info(f"micro_batch_size=auto: {saved.size}, as in the checkpoint")
            return
        self.result = None
        rank_zero_info(
            f"micro_batch_size=auto: {saved.size}, as in the checkpoint, would take {need / 2**30:.1f} of "
            f"{now.limit / 2**30:.1f} GiB with what is allocated now, so the number is searched anew"
        )

    @contextmanager
    def update(self, optimizer: Optimizer, has_gradients: Callable[[], bool]) -> Iterator[None]:
        """Surround an optimizer step, which counts if the optimizer runs and has gradients then."""
        if self._memory is None:
            yield
            return

        def count(*_: Any) -> None:
            self._updates += has_gradients()

        handle = optimizer.register_step_post_hook(count)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Run a training step on this rank's ``samples``, and choose the number for the next one."""
        if self._memory is None:
            yield
            return
        end = self._memory.measure(samples)
        yield
        usage = end()  # on every rank, also on one that has no samples
        if self._updates >= WARM_UP and usage.samples:
            self._choose(usage.samples, usage)

    def _choose(self, samples: int, usage: Usage) -> None:
        assert self.size is not None
        used = max(1, usage.peak - usage.before)
        # What a step needs besides activations does not grow, so this can only be too careful.
        fits = self.size * (usage.limit - usage.before) // used
        # At most twice as many: memory may grow faster than samples do, and a step that fails hangs all ranks.
        following = balanced(samples, min(2 * self.size, fits))
        if following > self.size:
            self.size = following
            return
        # The last number that was measured, and no guess.
        self.size = balanced(samples, self.size)
        self.result, self._memory = FoundSize(self.size, usage.before, used), None
        rank_zero_info(
            f"micro_batch_size=auto: {self.size} of {samples} samples at once "
            f"({usage.peak / 2**30:.1f} of {usage.limit / 2**30:.1f} GiB). It is kept in checkpoints; give "
            f"micro_batch_size={self.size} to begin with it."
        )


def balanced(samples: int, size: int) -> int:
    """Return the size of equal micro-batches: as many as ``size`` needs, none almost empty. At least 1.

    16 samples by 11 take two micro-batches, so 8 and 8 are as fast as 11 and 5, and need less.
    """
    return math.ceil(samples / math.ceil(samples / max(1, min(size, samples))))


def of_strategy(
    given: int | Literal["auto"] | None, device: torch.device, mesh: ParallelMesh, saved: FoundSize | None
) -> MicroBatchSize:
    """Return the number for a run.

    Args:
        given: the user's argument.
        device: the device of this rank.
        mesh: the ranks.
        saved: what the checkpoint has from which this run resumes.

    Raises:
        ConfigurationError: ``auto`` cannot find one here.
    """
    if given != AUTO:
        return MicroBatchSize(given)
    if mesh.pp > 1:
        raise ConfigurationError(
            "micro_batch_size='auto' takes the largest micro-batches, and pipeline stages idle the longer, the fewer "
            "micro-batches there are. Give a number with pipeline_parallel > 1."
        )
    return MicroBatchSize(1, DeviceMemory(device, mesh), saved)
