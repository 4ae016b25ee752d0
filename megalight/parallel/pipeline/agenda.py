"""One rank's work in a step, and when it makes room for each message that it expects.

On a GPU a receive waits on the device, and takes multiprocessors meanwhile; and a host that loads a kernel, or gives
memory back, waits until its device has nothing left to do. That happens in the first step and, where another shape
needs another kernel, at any time later. A receive posted too early then stops the very host for whose next message the
sender waits, and nothing ever moves again. So a rank posts a receive ahead of an action only if, on the timeline, the
message has been sent before the action begins. In the order of beginnings all waits then point back: a step comes to
its end even if, before every action, each host waits for all that its rank has posted. Tests play it so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalight.parallel.pipeline.actions import Actions, Kind
from megalight.parallel.pipeline.timeline import Number, Place, comes, gives, simulate


class Expected(NamedTuple):
    """One message.

    Attributes:
        chunk, micro_batch: for which work.
        before: number of the first of this rank's actions that begins after it is sent. A message of unknown form has
            been announced then: the host need not wait for that.
    """

    chunk: int
    micro_batch: int
    before: int


@dataclass(frozen=True)
class Agenda:
    """What one rank does, and what comes meanwhile.

    Attributes:
        actions: in order.
        activations, gradients: the messages of either channel, in the order of use.
    """

    actions: Actions
    activations: tuple[Expected, ...] = ()
    gradients: tuple[Expected, ...] = ()


def agenda_of(rank: int, schedules: Sequence[Actions]) -> Agenda:
    """What one pipeline rank does in a step.

    Args:
        schedules: the lists of all ranks.

    Raises:
        LayoutError: the lists do not fit together (:func:`simulate`).
    """
    pp = len(schedules)
    vpp = 1 + max((action.chunk for actions in schedules for action in actions), default=0)
    lines = simulate(schedules).ranks
    sent: dict[Place, Number] = {}
    for sender, spans in enumerate(lines):
        if sender != rank:
            sent |= {place: span.end for span in spans if (place := gives(span.action, sender, pp)) is not None}
    starts = [span.start for span in lines[rank]]
    found: dict[bool, list[Expected]] = {True: [], False: []}
    for action in schedules[rank]:
        place = comes(action, rank, pp, vpp)
        if place is not None and place in sent:
            expected = Expected(action.chunk, action.micro_batch, bisect_left(starts, sent[place]))
            found[action.kind is Kind.FORWARD].append(expected)
    return Agenda(schedules[rank], tuple(found[True]), tuple(found[False]))
