"""1F1B: one forward, one backward, with one chunk per rank (Narayanan et al., https://arxiv.org/abs/2104.04473, 2.2.1).

A rank starts with as many forwards as there are ranks after it, so that the last rank never waits. Then forwards and
backwards alternate, and each backward frees the memory that the next forward needs. Rank ``p`` holds activations of at
most ``min(m, pp - p)`` micro-batches. The bubble is ``(pp - 1) / m`` of the work. With one rank, this is plain gradient
accumulation.
"""

from __future__ import annotations

from megalight.parallel.pipeline.actions import Action, Actions, Kind
from megalight.parallel.pipeline.schedules.order import alternate


def why_not(pp: int, vpp: int, group_size: int | None) -> str | None:
    """Return why it cannot serve these numbers, or None: it has one chunk per rank, and so no groups."""
    if vpp > 1:
        return f"it runs one chunk per rank, not vpp={vpp}; use 'interleaved'"
    if group_size is not None:
        return f"it has no groups of micro-batches; remove group_size={group_size}"
    return None


def warm_up(pp_rank: int, pp: int) -> int:
    """Return the number of forwards before the first pair of forward and backward."""
    return pp - pp_rank - 1


def one_f_one_b(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the actions of one rank."""
    forwards = [Action(Kind.FORWARD, 0, i) for i in range(micro_batches)]
    backwards = [Action(Kind.BACKWARD, 0, i) for i in range(micro_batches)]
    return alternate(forwards, backwards, warm_up(pp_rank, pp))
