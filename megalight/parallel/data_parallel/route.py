"""The way of a step's passes through the units of a rank, and the turns in which units use the same memory.

Without a pipeline, a forward pass goes through all units, and the backward pass returns the same way. A pipeline has
several micro-batches in flight, and maybe several chunks of the model on a rank: the pass that follows may be a forward
or a backward of any chunk. Neighbors must not share memory, or the second one cannot be gathered (or its gradients
cannot come) while the first one computes (or is reduced).

Models that run one after the other have turns of their own. Which units of a model are still there then depends on its
own passes alone, and not on the stage of another model that a rank has: all ranks that share its units gather the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

from torch import nn

T = TypeVar("T")


class Pass(NamedTuple):
    """One pass through a chunk.

    Attributes:
        chunk: the chunk of this rank, in model order.
        forward: whether it is a forward pass.
    """

    chunk: int
    forward: bool


@dataclass(frozen=True)
class Route:
    """The chunks of a rank, and the order of passes through them.

    Attributes:
        chunks: the chunks, in model order; none: all units are one chunk.
        passes: the passes of a typical step. Passes that read no parameters are left out.
        phases: the chunks of each model, in the order in which models run; none: all chunks are of one.
    """

    chunks: Sequence[nn.Module] = ()
    passes: Sequence[Pass] = ()
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
