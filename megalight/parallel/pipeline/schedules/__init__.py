"""Schedules: the actions of each pipeline rank in one step. A schedule is a file here and a line in ``SCHEDULES``.

Each file has a function that makes the actions of one rank, and ``why_not``, which says what it cannot serve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megalight.errors import LayoutError, nearest
from megalight.parallel.pipeline.actions import Actions
from megalight.parallel.pipeline.schedules import combined, forward_only, interleaved, one_f_one_b, zero_bubble
from megalight.parallel.pipeline.schedules.order import group_sizes


@dataclass(frozen=True)
class Schedule:
    """A schedule.

    Attributes:
        of_rank: ``(pp_rank, pp, vpp, micro_batches, group_size) -> Actions``.
        why_not: ``(pp, vpp, group_size)`` -> the reason why it cannot serve them, or None.
    """

    of_rank: Callable[[int, int, int, int, int | None], Actions]
    why_not: Callable[[int, int, int | None], str | None]


SCHEDULES = {
    "1f1b": Schedule(one_f_one_b.one_f_one_b, one_f_one_b.why_not),
    "interleaved": Schedule(interleaved.interleaved, interleaved.why_not),
    "zero_bubble": Schedule(zero_bubble.zero_bubble, zero_bubble.why_not),
    "combined": Schedule(combined.combined, combined.why_not),
    "forward_only": Schedule(forward_only.forward_only, forward_only.why_not),
}
"""Name -> schedule. ``"auto"`` means ``1f1b``, or ``interleaved`` if a rank has several chunks."""


def chosen(name: str, vpp: int) -> str:
    """Return the name of the schedule that ``name`` means: it resolves ``auto``."""
    return name if name != "auto" else "interleaved" if vpp > 1 else "1f1b"


def check(name: str, pp: int, vpp: int = 1, micro_batches: int = 1, group_size: int | None = None) -> Schedule:
    """Return a schedule after checking that it can serve these numbers.

    Any number of micro-batches can run. :func:`waste` warns if there are too few for good speed.

    Args:
        name: one of ``SCHEDULES``, or ``"auto"``.
        pp: pipeline ranks.
        vpp: chunks on each rank.
        micro_batches: micro-batches of the step.
        group_size: micro-batches in a row through one chunk, if ``vpp > 1``. None: ``pp``.

    Raises:
        LayoutError: the name is unknown, a number is below 1, or the schedule cannot serve them.
    """
    # Resolved first, so that messages tell the schedule that will run.
    name = chosen(name, vpp)
    if name not in SCHEDULES:
        known = ("auto", *SCHEDULES)
        raise LayoutError(f"unknown pipeline schedule {name!r}; known: {', '.join(known)}.{nearest(name, known)}")
    for what, value in (("pp", pp), ("vpp", vpp), ("micro_batches", micro_batches)):
        if value < 1:
            raise LayoutError(f"{what}={value} for the pipeline schedule {name!r}; it must be at least 1.")
    # One rank holds all layers anyway: chunks would only cut them.
    if vpp > 1 and pp == 1:
        raise LayoutError(f"vpp={vpp} chunks per rank with pp=1; there is no pipeline to interleave. Set vpp to 1.")
    if reason := SCHEDULES[name].why_not(pp, vpp, group_size):
        raise LayoutError(f"pipeline schedule {name!r} cannot run this: {reason}.")
    return SCHEDULES[name]


def build(name: str, pp: int, vpp: int = 1, micro_batches: int = 1, group_size: int | None = None) -> list[Actions]:
    """Return the actions of every pipeline rank. Arguments and errors are those of :func:`check`."""
    found = check(name, pp, vpp, micro_batches, group_size)
    return [found.of_rank(rank, pp, vpp, micro_batches, group_size) for rank in range(pp)]


def waste(pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> str | None:
    """Return a warning if ranks wait longer than necessary, else None.

    With fewer micro-batches than ranks, ``pp - m`` ranks are idle at any time, and chunks do not change that. The
    bubble is ``(pp - m) / m + (m - 1) / (m * vpp)`` of the work. With chunks, a last group of less than ``pp``
    micro-batches takes up to as long as one of ``pp``.
    """
    m = micro_batches
    # Fewer micro-batches than ranks: more chunks cannot fill the pipeline.
    if m < pp:
        bubble = (pp - m + (m - 1) / vpp) / m
        return (
            f"{m} micro-batch{'es' * (m > 1)} in a pipeline of {pp} ranks: the bubble is {bubble:.0%} of the work. Use "
            f"at least {pp} smaller micro-batches (4 x {pp} for less than 25%), or lower pp."
        )
    last = group_sizes(pp, m, group_size or pp)[-1]
    if vpp == 1 or last >= pp:
        return None
    size = -(-m // (m // pp))
    return (
        f"{m} micro-batches in groups of {group_size or pp}: the last group has {last}, less than pp={pp}, so ranks "
        f"wait. Use a multiple of {pp}, or group_size={size}, which keeps activations of {(vpp - 1) * (size - pp)} "
        "more chunks in memory than groups of pp."
    )
