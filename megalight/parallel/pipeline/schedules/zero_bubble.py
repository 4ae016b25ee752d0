"""ZB-H1: weight gradients fill the bubble (Qi et al., arXiv 2401.10241, section 2.2), over 1F1B and interleaved 1F1B.

Only the gradient of a chunk's *input* is waited for by another rank. So each backward is cut in two: the input gradient
in its place, the weight gradient later, when the rank would wait. Rank ``p`` puts its weight gradients off by ``p``
micro-batches, so that it hands on its first input gradients ``p`` weight gradients earlier, and fills the end, when
nothing is left to wait for. With ``W`` no longer than the others, the bubble falls from ``(pp - 1) (F + I + W)`` to
``(pp - 1) (F + I - W)``, times of a chunk.

Activations live until their weight gradient is done; no rank holds more of them than the first one does under the
schedule this is built on.
"""

from __future__ import annotations

from megalight.parallel.pipeline.actions import Actions
from megalight.parallel.pipeline.schedules import interleaved as chunks
from megalight.parallel.pipeline.schedules import one_f_one_b as whole
from megalight.parallel.pipeline.schedules.order import split


def why_not(pp: int, vpp: int, group_size: int | None) -> str | None:
    """As the schedule it is built on."""
    return whole.why_not(pp, vpp, group_size) if vpp == 1 else chunks.why_not(pp, vpp, group_size)


def zero_bubble(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """The work of one rank."""
    base = whole.one_f_one_b if vpp == 1 else chunks.interleaved
    return split(base(pp_rank, pp, vpp, micro_batches, group_size), delay=pp_rank)
