"""ZB-H1: weight gradients fill the bubble (Qi et al., https://arxiv.org/abs/2401.10241, section 2.2).

It is built on 1F1B or interleaved 1F1B. Other ranks wait only for the gradient of a chunk's *input*. So each backward
is split: the input gradient keeps its place, and the weight gradient comes later, when the rank would wait. Rank ``p``
delays its weight gradients by ``p`` micro-batches. So it sends its first input gradients ``p`` weight gradients
earlier, and the delayed weight gradients fill the end of the step. Let a chunk take ``F`` forward, ``I`` for the input
gradient and ``W`` for the weight gradient. If ``W`` is no longer than ``F`` or ``I``, the bubble falls from
``(pp - 1) (F + I + W)`` to ``(pp - 1) (F + I - W)``.

Activations stay in memory until their weight gradient is done. No rank holds more of them than the first rank does in
the base schedule.
"""

from __future__ import annotations

from megalight.parallel.pipeline.actions import Actions
from megalight.parallel.pipeline.schedules import interleaved as chunks
from megalight.parallel.pipeline.schedules import one_f_one_b as whole
from megalight.parallel.pipeline.schedules.order import split


def why_not(pp: int, vpp: int, group_size: int | None) -> str | None:
    """Return why the base schedule cannot serve these numbers, or None."""
    return whole.why_not(pp, vpp, group_size) if vpp == 1 else chunks.why_not(pp, vpp, group_size)


def zero_bubble(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the actions of one rank."""
    base = whole.one_f_one_b if vpp == 1 else chunks.interleaved
    return split(base(pp_rank, pp, vpp, micro_batches, group_size), delay=pp_rank)
