"""Unit memory: how many buffers units use in turn (prefetch), and how long their gradients stay whole.

Both are a trade of memory for speed. Where the user leaves the choice open, they follow from the memory that is free
before the engine takes its own. :class:`PassOrder` learns in which order passes visit units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.parallel.data_parallel.buffers import Allocating
from megalight.parallel.data_parallel.layout import BucketLayout

GRADIENT_BUFFERS = 2
"""Gradients of one unit are reduced while those of another one arrive."""
MAX_PREFETCH = 3
"""Automatic choices go no further: more units on their way do not arrive earlier."""
PREFETCH_SHARE = 0.02
"""Share of the free memory that buffers for parameters may take where the engine chooses."""
SAVED_SHARE = 0.5
"""Share of the memory that sharding parameters saves which these buffers may take again."""
GRADIENT_SHARE = 0.1
"""Share of the free memory that whole gradients may take where the engine chooses."""


@dataclass(frozen=True)
class UnitMemory:
    """How units use memory, and why.

    Attributes:
        prefetch: number of units that are gathered ahead of the one that computes.
        reduce_each: every micro-batch reduces gradients, so that only shards of them stay. False: whole gradients stay
            until the last micro-batch of a step reduces them.
        reasons: name of each choice -> what was chosen, and why. The engine adds its own.
    """

    prefetch: int
    reduce_each: bool
    reasons: dict[str, str]

    @property
    def turns(self) -> int:
        """Number of units whose whole parameters have memory at a time."""
        return self.prefetch + 1


def choose(
    layouts: Sequence[BucketLayout],
    shards_params: bool,
    prefetch: int | None,
    reduce_each: bool | None,
    free: int | None,
) -> UnitMemory:
    """Decide how units use memory.

    Args:
        layouts: all buckets, those outside of units too.
        shards_params: whether parameters are sharded; if not, nothing is gathered, and gradients are always reduced.
        prefetch, reduce_each: the user's choices; None: choose here.
        free: bytes that the device has free, on the rank with the fewest; None: not known.
    """
    # Buckets outside of units keep their memory all the time.
    in_units = [layout for layout in layouts if layout.kind.unit is not None]
    largest: dict[object, int] = {}
    for layout in in_units:
        # One buffer per kind of parameter and gradient, as large as the largest unit needs it.
        key = replace(layout.kind, unit=None, chunk=0)
        largest[key] = max(largest.get(key, 0), layout.numel * layout.kind.stored_dtype.itemsize)
    buffer, reasons = sum(largest.values()), dict[str, str]()
    units = len({layout.kind.unit for layout in in_units})
    if prefetch is None:
        # A buffer more only smooths out units of uneven size, so it must not cost memory that activations may need.
        # And not what sharding has just saved: a model of few units would need more memory than without it.
        saved = sum(layout.numel * layout.kind.stored_dtype.itemsize * (1 - 1 / _shards(layout)) for layout in in_units)
        spare = 0 if free is None else int(min(PREFETCH_SHARE * free, SAVED_SHARE * saved))
        # One less, as the unit that computes has a buffer, too.
        deeper = spare // buffer - 1 if buffer else 0
        prefetch = max(1, min(deeper, MAX_PREFETCH, units - 1))
        why = _share((prefetch + 1) * buffer, free)
    else:
        why = "as data_parallel.prefetch says"
    if shards_params:
        reasons["prefetch"] = f"{prefetch} ahead, {prefetch + 1} buffers of {_gib(buffer)}: {why}"
    whole = sum(layout.numel * layout.kind.grad_dtype.itemsize for layout in in_units)
    if reduce_each is None:
        reduce_each = not shards_params or free is None or whole > GRADIENT_SHARE * free
        why = _share(whole, free)
    else:
        why = "as data_parallel.reduce_each_micro_batch says"
    when = "by each micro-batch" if reduce_each else "by the last micro-batch"
    reasons["gradients"] = f"reduced {when}; whole ones of all units take {_gib(whole)}: {why}"
    return UnitMemory(prefetch, reduce_each, reasons)


def free_memory(device: torch.device, everyone: ProcessGroup | None) -> int | None:
    """Return the bytes that can still be allocated on the rank that has the fewest; None on a CPU.

    All ranks call this together: they gather units in the same order, so they must choose alike.
    """
    if device.type != "cuda":
        return None
    # Memory that the allocator holds for later use is free to us as well.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.tensor(torch.cuda.mem_get_info(device)[0] + cached, device=device)
    if everyone is not None:
        dist.all_reduce(free, op=dist.ReduceOp.MIN, group=everyone)
    return int(free)


Room = Callable[[BucketLayout, int, torch.dtype], Tensor | None]


class RotatingBuffers:
    """Memory that buckets of different units use in turn: per kind and turn, as large as the largest one needs it.

    Args:
        layouts: the buckets.
        turns: the turn of each unit (:meth:`.route.Route.turns`).
        allocating: a context in which it is allocated.
        room: makes ``(numel, dtype)`` of memory for a bucket's layout itself; None, or if it returns None: torch does.
    """

    def __init__(
        self,
        layouts: Sequence[BucketLayout],
        turns: Sequence[int],
        device: torch.device,
        allocating: Allocating = nullcontext,
        room: Room | None = None,
    ) -> None:
        self._turns = turns
        self._room = room
        self._allocating = allocating
        self._device = device
        self._flat: dict[tuple[object, ...], Tensor] = {}
        self._largest: dict[tuple[object, ...], int] = {}
        for layout in layouts:
            key = self._key(layout)
            self._largest[key] = max(layout.numel, self._largest.get(key, 0))

    def take(self, layout: BucketLayout, dtype: torch.dtype) -> Tensor | None:
        """Return the memory of a bucket, NaN at first; None: it belongs to no unit."""
        if layout.kind.unit is None:
            return None
        key = self._key(layout)
        if key not in self._flat:
            # NaN, not zero: what is read before it is gathered or written then shows in the loss at once.
            size = self._largest[key]
            with self._allocating():
                made = self._room(layout, size, dtype) if self._room else None
                made = self._new(size, dtype) if made is None else made
            # Bytes are parts of other dtypes, in all of which ones alone are NaN.
            self._flat[key] = made.fill_(torch.nan if dtype.is_floating_point else 255)
        return self._flat[key][: layout.numel]

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _key(self, layout: BucketLayout) -> tuple[object, ...]:
        # Neighbors get different turns, so one is gathered while the other one computes. Chunks share memory.
        unit = layout.kind.unit
        return replace(layout.kind, unit=None, chunk=0), None if unit is None else self._turns[unit]


def _shards(layout: BucketLayout) -> int:
    return len(layout.kind.shard_ranks)


def _share(size: int, free: int | None) -> str:
    return "the free memory is not known" if free is None else f"{size / max(free, 1):.1%} of the {_gib(free)} free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"


T = TypeVar("T")


class UnitPass(NamedTuple):
    """One pass through a chunk.

    Without a pipeline, a forward pass goes through all units, and the backward pass returns the same way. A
    pipeline has several micro-batches in flight, and maybe several chunks of the model on a rank: the pass that
    follows may be a forward or a backward of any chunk. Neighbors must not share memory, or the second one cannot
    be gathered (or its gradients cannot come) while the first one computes (or is reduced).

    Models that run one after the other have turns of their own. Which units of a model are still there then depends
    on its own passes alone, and not on the stage of another model that a rank has: all ranks that share its units
    gather the same.

    Attributes:
        chunk: the chunk of this rank, in model order.
        forward: whether it is a forward pass.
    """

    chunk: int
    forward: bool


@dataclass(frozen=True)
class PassOrder:
    """The chunks of a rank, and the order of passes through them.

    Attributes:
        chunks: the chunks, in model order; none: all units are one chunk.
        passes: the passes of a typical step. Passes that read no parameters are left out.
        phases: the chunks of each model, in the order in which models run; none: all chunks are of one.
    """

    chunks: Sequence[nn.Module] = ()
    passes: Sequence[UnitPass] = ()
    phases: Sequence[Sequence[int]] = ()

    def parts(self, units: Sequence[Sequence[nn.Module]]) -> list[list[int]]:
        """Return the units of each chunk, in order. Units in no chunk follow as one more.

        Args:
            units: the modules of each unit, in model order.
        """
        home = {id(module): chunk for chunk, root in enumerate(self.chunks) for module in root.modules()}
        found: list[list[int]] = [[] for _ in range(len(self.chunks) + 1)]
        for unit, modules in enumerate(units):
            found[home.get(id(modules[0]), len(self.chunks))].append(unit)
        return found if found[-1] else found[:-1]

    def by_phase(self, parts: Sequence[T]) -> list[list[T]]:
        """Divide :meth:`parts` among the models; what is in no chunk belongs to the last one."""
        phases = [list(phase) for phase in self.phases or [range(len(self.chunks))]]
        phases[-1] += range(len(self.chunks), len(parts))
        return [[parts[number] for number in phase] for phase in phases]

    def turns(self, units: Sequence[Sequence[nn.Module]], turns: int, backward_only: bool = False) -> list[int]:
        """Return each unit's turn, ``0`` to ``turns - 1``, and so on in further models: units of one turn share memory.

        Inside a chunk, turns follow each other. Each chunk begins with the turn that gives the fewest passes a first
        unit with the turn of the last unit of the pass before.

        Args:
            units: the modules of each unit, in model order.
            backward_only: count backward passes only, as gradients do.
        """
        parts = self.parts(units)
        # A pass of a chunk without units uses no memory, so those before and after it are neighbors.
        ways = [
            parts[step.chunk][:: 1 if step.forward else -1]
            for step in self.passes
            if parts[step.chunk] and not (backward_only and step.forward)
        ]
        # The same unit twice in a row stays where it is.
        meetings = [(one[-1], other[0]) for one, other in pairwise(ways) if one[-1] != other[0]]
        found: dict[int, int] = {}
        for number, phase in enumerate(self.by_phase(parts)):
            own: dict[int, int] = {}
            for part in phase:
                # The numbering goes on if nothing speaks against it.
                starts = [(len(own) + shift) % turns for shift in range(turns)]
                tries = [own | {unit: (start + place) % turns for place, unit in enumerate(part)} for start in starts]
                own = min(tries, key=lambda tried: _clashes(tried, meetings))
            found |= {unit: number * turns + turn for unit, turn in own.items()}
        return [found[unit] for unit in range(len(units))]


def _clashes(turns: dict[int, int], meetings: Sequence[tuple[int, int]]) -> int:
    return sum(turns.get(one, -1) == turns.get(other, -2) for one, other in meetings)
