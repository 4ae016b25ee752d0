"""Actions: one piece of work of one chunk for one micro-batch. A schedule is a list of actions."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias


class Kind(Enum):
    """Kinds of work. ``BACKWARD`` is ``INPUT_GRADIENT`` and ``WEIGHT_GRADIENT`` together."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One piece of work of one pipeline rank.

    Attributes:
        kind: the kind of work.
        chunk: the chunk of the rank, counted in model order.
        micro_batch: the micro-batch of the step.
        beside: for ``BACKWARD``: the forward of another micro-batch that runs together with it.
    """

    kind: Kind
    chunk: int
    micro_batch: int
    beside: Action | None = None

    @property
    def parts(self) -> tuple[Action, ...]:
        """The pieces of work that begin and end together."""
        # A combined backward counts as both: bubbles, memory and messages are reckoned piece by piece.
        return (self,) if self.beside is None else (self.beside, self._replace(beside=None))

    def __str__(self) -> str:
        return "+".join(f"{part.kind.value}{part.micro_batch}.{part.chunk}" for part in self.parts)


Actions: TypeAlias = list[Action]
"""The work of one pipeline rank in one step, in order."""
