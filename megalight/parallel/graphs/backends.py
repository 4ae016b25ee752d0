"""The registry of backends that record layers, or their attention, as CUDA graphs; packages may add to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.graphs.recorder import Recorder
from megalight.parallel.pipeline.schedules import Actions
from megalight.registry import Registry

Named = tuple[str, nn.Module]


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Parts:
    """The modules to record, and what a backend needs for it.

    Attributes:
        lanes: the modules of each chunk of this rank, in the order in which they run.
        chained: each module's output is the next one's input, and the last module's output leaves the chunk.
        engine: gathers parameters and reduces gradients, both outside the graphs.
        device: device of the modules.
        recorder: records and replays.
        schedule: number of micro-batches of a step -> this rank's work in it.
        rehearsal: a context for trial runs; it restores the scale histories that they change.
        generators: random generators that modules use besides the default ones.
        warmup_steps: number of eager steps, at least 2.
        refuse: called with the reason why modules run eagerly; may raise.
        agree: numbers of the ranks that share each module -> the largest of each. These must record, replay and run
            eagerly together: what one of them sends, the others expect in the slot of their own recording.
        tell: called on all of these ranks together, when it changes whether calls are recorded. Modules may then work
            in another way.
    """

    lanes: Sequence[Sequence[Named]]
    chained: bool
    engine: DataParallelEngine
    device: torch.device
    recorder: Recorder
    schedule: Callable[[int], Actions]
    rehearsal: Callable[[], AbstractContextManager[None]]
    generators: Callable[[], Sequence[torch.Generator]]
    warmup_steps: int
    refuse: Callable[[str], None]
    agree: Callable[[list[int]], list[int]] = list
    tell: Callable[[bool], None] = lambda recorded: None


class PartGraphs(Protocol):
    """Replaces the forwards of modules: they run eagerly at first, then from graphs.

    Attributes:
        replays: number of forwards that were replayed.
    """

    replays: int

    def begin_step(self, micro_batches: int) -> None:
        """Begin a step of ``micro_batches`` micro-batches."""
        ...

    def close(self) -> None:
        """Restore the modules' own forwards, and free the graphs."""
        ...


@dataclass(frozen=True)
class GraphBackend:
    """One way to record modules.

    Attributes:
        start: takes over the modules.
        why_not: device type -> why the backend cannot serve it, or None.
    """

    start: Callable[[Parts], PartGraphs]
    why_not: Callable[[str], str | None]


GRAPH_BACKENDS: Registry[GraphBackend] = Registry("backend of CUDA graphs")
