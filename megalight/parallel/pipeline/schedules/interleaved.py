"""Interleaved 1F1B: several chunks per rank (Narayanan et al., arXiv 2104.04473, section 2.2.2).

Micro-batches go in groups (of ``pp`` at most, unless told otherwise) through chunk 0 of every rank, through chunk 1,
..., and back in the opposite order. Filling the pipeline takes the time of a chunk per rank instead of a whole rank's,
so the bubble is ``(pp - 1) / (m * vpp)`` of the work. The price: ``vpp`` times the transfers, and activations of up to
``2 (pp - p - 1) + (vpp - 1) * group + 1`` chunks on rank ``p``.

The number of micro-batches is free. A last group of less than ``pp`` cannot keep the ring of ranks busy, which costs up
to as much as if it were ``pp``; groups of up to ``ceil(m / (m // pp))`` leave no such rest, for any ``m >= pp``.
"""

from __future__ import annotations

from megalight.parallel.pipeline.actions import Action, Actions, Kind
from megalight.parallel.pipeline.schedules.order import alternate, rounds


def why_not(pp: int, vpp: int, group_size: int | None) -> str | None:
    """It needs chunks to interleave, and groups that fill the ring of ranks."""
    if vpp == 1:
        return "it interleaves the chunks of a rank, but vpp=1; use '1f1b', or more chunks"
    if group_size is not None and group_size < pp:
        return (
            f"in groups of {group_size} micro-batches the first comes round before pp={pp} ranks had work; "
            f"use group_size={pp} or more"
        )
    return None


def warm_up(pp_rank: int, pp: int, vpp: int, group_size: int | None = None) -> int:
    """Forwards of a chunk before the first pair."""
    return 2 * (pp - pp_rank - 1) + (vpp - 1) * (group_size or pp)


def interleaved(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """The work of one rank."""
    order = rounds(pp, vpp, micro_batches, group_size or pp)
    forwards = [Action(Kind.FORWARD, chunk, i) for chunk, i in order]
    backwards = [Action(Kind.BACKWARD, vpp - 1 - chunk, i) for chunk, i in order]
    actions = alternate(forwards, backwards, warm_up(pp_rank, pp, vpp, group_size))
    return [action for action in actions if action.micro_batch < micro_batches]
