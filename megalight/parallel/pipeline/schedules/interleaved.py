"""Interleaved 1F1B with several chunks per rank (Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2.2).

Micro-batches go in groups (by default of at most ``pp``) through chunk 0 of every rank, then through chunk 1, and so
on, and back in the opposite order. To fill the pipeline takes the time of one chunk per rank instead of a whole rank.
So the bubble is ``(pp - 1) / (m * vpp)`` of the work. The costs are ``vpp`` times the transfers, and activations of up
to ``2 (pp - p - 1) + (vpp - 1) * group + 1`` chunks on rank ``p``.

Any number of micro-batches works. A last group of less than ``pp`` cannot keep all ranks busy and takes up to as long
as a group of ``pp``. Groups of up to ``ceil(m / (m // pp))`` micro-batches avoid such a group for any ``m >= pp``.
"""

from __future__ import annotations

from megalight.parallel.pipeline.actions import Action, Actions, Kind
from megalight.parallel.pipeline.schedules.order import alternate, rounds


def why_not(pp: int, vpp: int, group_size: int | None) -> str | None:
    """Return why it cannot serve these numbers, or None: it needs several chunks, and groups of at least ``pp``."""
    if vpp == 1:
        return "it interleaves the chunks of a rank, but vpp=1; use '1f1b', or more chunks"
    if group_size is not None and group_size < pp:
        return f"group_size={group_size} is below pp={pp}, so some ranks would be idle; use group_size={pp} or more"
    return None


def warm_up(pp_rank: int, pp: int, vpp: int, group_size: int | None = None) -> int:
    """Return the number of forwards before the first pair of forward and backward."""
    return 2 * (pp - pp_rank - 1) + (vpp - 1) * (group_size or pp)


def interleaved(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the actions of one rank."""
    order = rounds(pp, vpp, micro_batches, group_size or pp)
    forwards = [Action(Kind.FORWARD, chunk, i) for chunk, i in order]
    # A micro-batch comes back through the chunks in the opposite order.
    backwards = [Action(Kind.BACKWARD, vpp - 1 - chunk, i) for chunk, i in order]
    actions = alternate(forwards, backwards, warm_up(pp_rank, pp, vpp, group_size))
    # The numbers that only filled up the last group go out here, after they have kept the order.
    return [action for action in actions if action.micro_batch < micro_batches]
