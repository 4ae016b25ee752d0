"""What a schedule is made of: one piece of work of one chunk for one micro-batch. A schedule is a list of these."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias


class Kind(Enum):
    """The work. ``BACKWARD`` is ``INPUT_GRADIENT`` and ``WEIGHT_GRADIENT`` at once."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One piece of work of one pipeline rank.

    Attributes:
        kind: what is done.
        chunk: which of the rank's chunks does it, counted in model order.
        micro_batch: for which micro-batch of the step.
    """

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}.{self.chunk}"


Actions: TypeAlias = list[Action]
"""The work of one pipeline rank in one step, in the order in which it is done."""
