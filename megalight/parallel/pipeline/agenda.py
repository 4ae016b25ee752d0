"""The agenda of a rank: its actions in a step, and when it posts the receive of each message.

A receive that is posted too early can cause a deadlock on GPUs:

- A posted receive waits on the device and occupies multiprocessors.
- A host that loads a kernel or frees memory waits until its device is idle. This happens in the first step, and later
  whenever a new shape needs a new kernel.
- So a host may wait for a receive whose sender waits for a message of this host.

Therefore a rank posts a receive before an action only if, on the timeline, the message is sent before the action
begins. Then every wait is for something that began earlier. A step ends even if each host waits for all posted messages
before every action. Tests simulate this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalight.parallel.pipeline.actions import Actions, Kind
from megalight.parallel.pipeline.timeline import Number, Place, comes, gives, simulate


class Expected(NamedTuple):
    """A message that a rank expects.

    Attributes:
        chunk, micro_batch: the work that needs it.
        before: number of this rank's first action that begins after the message is sent. If the form of the message was
            unknown, the sender has announced it by then, so the host does not wait for the announcement.
    """

    chunk: int
    micro_batch: int
    before: int


@dataclass(frozen=True)
class Agenda:
    """The actions of one rank and the messages that it receives.

    Attributes:
        actions: the actions, in order.
        activations, gradients: the messages of each channel, in the order of use.
    """

    actions: Actions
    activations: tuple[Expected, ...] = ()
    gradients: tuple[Expected, ...] = ()


def agenda_of(rank: int, schedules: Sequence[Actions]) -> Agenda:
    """Return the agenda of one pipeline rank.

    Args:
        rank: the pipeline rank.
        schedules: the actions of all ranks.

    Raises:
        LayoutError: the schedules do not fit together (:func:`simulate`).
    """
    pp = len(schedules)
    vpp = 1 + max((action.chunk for actions in schedules for action in actions), default=0)
    # Default costs: only the order counts. It is without deadlock for the device, whatever the true times are.
    lines = simulate(schedules).ranks
    sent: dict[Place, Number] = {}
    for sender, spans in enumerate(lines):
        # Between chunks of one rank nothing is sent.
        if sender != rank:
            ends = [(part, span.end) for span in spans for part in span.action.parts]
            # Both parts of a combined action end together, so both messages leave at its end.
            sent |= {place: end for part, end in ends if (place := gives(part, sender, pp)) is not None}
    starts = [span.start for span in lines[rank]]
    found: dict[bool, list[Expected]] = {True: [], False: []}
    for part in (part for action in schedules[rank] for part in action.parts):
        place = comes(part, rank, pp, vpp)
        if place is not None and place in sent:
            # The first action that starts when the message has been sent, or later.
            expected = Expected(part.chunk, part.micro_batch, bisect_left(starts, sent[place]))
            found[part.kind is Kind.FORWARD].append(expected)
    return Agenda(schedules[rank], tuple(found[True]), tuple(found[False]))
