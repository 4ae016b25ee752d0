"""Combined 1F1B: a forward and a backward run together, and each computes while the messages of the other travel.

Expert parallelism sends tokens twice in each layer, forward and backward. Alone, a pass waits for them. So each
backward is paired with the forward of a later micro-batch, and they take turns (:mod:`megalight.parallel.turns`).
Weight gradients wait for such pauses too. DeepSeek-V3 does this in both directions of the pipeline at once
(https://arxiv.org/abs/2412.19437, section 3.2.1); here the order is that of 1F1B, or of interleaved 1F1B with several
chunks per rank.

A pair begins when both of its inputs are there, and sends both results at its end. So rank
``p`` starts with ``2 (pp - p - 1) + (vpp - 1) * group + 1`` forwards, and holds activations of as many chunks. With one
chunk per rank that is up to twice as much as 1F1B. The bubble is that of the base schedule.
"""

from __future__ import annotations

from megalight.parallel.pipeline.actions import Action, Actions, Kind
from megalight.parallel.pipeline.schedules import interleaved as chunks
from megalight.parallel.pipeline.schedules import one_f_one_b as whole
from megalight.parallel.pipeline.schedules.order import pair, rounds


def why_not(pp: int, vpp: int, group_size: int | None) -> str | None:
    """Return why the base schedule cannot serve these numbers, or None."""
    return whole.why_not(pp, vpp, group_size) if vpp == 1 else chunks.why_not(pp, vpp, group_size)


def combined(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the actions of one rank."""
    order = [(0, i) for i in range(micro_batches)] if vpp == 1 else rounds(pp, vpp, micro_batches, group_size or pp)
    forwards = [Action(Kind.FORWARD, chunk, i) for chunk, i in order]
    backwards = [Action(Kind.BACKWARD, vpp - 1 - chunk, i) for chunk, i in order]
    # one more than the base schedule: a forward cannot run together with its own backward
    return pair(forwards, backwards, chunks.warm_up(pp_rank, pp, vpp, group_size) + 1, micro_batches)
