"""Only forwards, for validation and generation: the order of interleaved 1F1B without its backwards."""

from __future__ import annotations

from megalight.parallel.pipeline.actions import Action, Actions, Kind
from megalight.parallel.pipeline.schedules import interleaved
from megalight.parallel.pipeline.schedules.order import rounds


def why_not(pp: int, vpp: int, group_size: int | None) -> str | None:
    """Return why it cannot serve these numbers, or None. Any number of chunks works."""
    return interleaved.why_not(pp, vpp, group_size) if vpp > 1 else None


def forward_only(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the actions of one rank; they are the same for all ranks."""
    order = rounds(pp, vpp, micro_batches, group_size or pp)
    return [Action(Kind.FORWARD, chunk, i) for chunk, i in order if i < micro_batches]
