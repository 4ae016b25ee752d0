"""Who records layers, or their attention, as CUDA graphs: a registry that packages add to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.graphs.recorder import Recorder
from megalight.parallel.pipeline.actions import Actions
from megalight.registry import Registry

Named = tuple[str, nn.Module]


@dataclass(frozen=True)
class Parts:
    """What is to be recorded, and what a backend may need for it.

    Attributes:
        lanes: the modules of each chunk of this rank, in the order in which they run.
        chained: each module's output is the next one's input, and the last one's leaves the chunk.
        engine: gathers parameters and reduces gradients; both go on outside the graphs.
        device: where the modules run.
        recorder: records and replays.
        schedule: this rank's work in a step of so many micro-batches.
        rehearsal: a context around runs of which nothing may be remembered.
        generators: that modules draw from, besides the default ones.
        warmup_steps: eager steps, at least 2.
        refuse: told why modules run eagerly; may raise.
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


class PartGraphs(Protocol):
    """Stands in for the forwards of modules: eagerly at first, then from graphs.

    Attributes:
        replays: forwards that were replayed.
    """

    replays: int

    def begin_step(self, micro_batches: int) -> None:
        """A step of so many micro-batches begins."""
        ...

    def close(self) -> None:
        """Give the modules their own forwards back, and the graphs up."""
        ...


@dataclass(frozen=True)
class GraphBackend:
    """One way to record modules.

    Attributes:
        start: takes the modules over.
        why_not: answers why it cannot serve a device type, or None.
    """

    start: Callable[[Parts], PartGraphs]
    why_not: Callable[[str], str | None]


GRAPH_BACKENDS: Registry[GraphBackend] = Registry("backend of CUDA graphs")
