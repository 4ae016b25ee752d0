"""The channels of a rank to its neighbors along ``pp``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megalight.errors import LayoutError
from megalight.parallel.groups import new_group, speaks
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.peers import memory
from megalight.parallel.pipeline.options import Messages
from megalight.parallel.pipeline.p2p import MAX_CTAS, Channel
from megalight.parallel.pipeline.peer_channel import Line, PeerChannel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Edges:
    """This rank's channels; None if there is no neighbor.

    Attributes:
        activations_in, activations_out: from the previous rank, to the next.
        gradients_in, gradients_out: from the next rank, to the previous.
        lines: slots that neighbors share, if copy engines carry the messages.
    """

    activations_in: Channel | None = None
    activations_out: Channel | None = None
    gradients_in: Channel | None = None
    gradients_out: Channel | None = None
    lines: list[Line] = field(default_factory=list)

    @classmethod
    def between(cls, mesh: ParallelMesh, around: bool, messages: Messages = "auto") -> Edges:
        """Create the channels of this rank along ``pp``. All ranks call it together.

        Args:
            around: the last rank also sends to the first one (there are several chunks per rank).
            messages: how they travel (:class:`~megalight.parallel.pipeline.options.Pipeline`).

        Raises:
            LayoutError: ``symmetric`` cannot serve two neighbors.
        """
        ranks = mesh.ranks("pp")
        here, size = mesh.rank("pp"), len(ranks)
        found: dict[str, Channel] = {}
        lines: list[Line] = []
        for first in range(size if around and size > 1 else size - 1):  # same order on all ranks, so neighbors meet
            second = (first + 1) % size
            if here in (first, second):
                # Gradients run against activations: this rank's outgoing activations are the edge of its incoming
                # gradients.
                side, peer = ("out", ranks[second]) if here == first else ("in", ranks[first])
                other = "in" if side == "out" else "out"
                ends = (ranks[first], ranks[second])
                pair = {f"activations_{side}": _channel(peer, ends, "activations")}
                pair[f"gradients_{other}"] = _channel(peer, ends, "gradients")
                if (line := _line(pair[f"activations_{side}"], ends, messages)) is not None:
                    lines.append(line)
                    pair = {name: PeerChannel(peer, c.group, c.host_group, line) for name, c in pair.items()}
                found |= pair
        return cls(**found, lines=lines)

    def prepare(self, slots: int) -> None:
        """Make room for the messages of a run. All ranks call this together, before it.

        Args:
            slots: the slots that the run needs, :attr:`~megalight.parallel.pipeline.agenda.Agenda.slots`.
        """
        for line in self.lines:
            line.prepare(slots)


def _channel(peer: int, ends: tuple[int, int], what: str) -> Channel:
    """Create one channel and send a first message, so that communicators are not created during a schedule."""
    purpose = f"{what} from {ends[0]} to {ends[1]}"
    # Sorted, so that both ends name the group in the same way.
    group = new_group(sorted(ends), purpose, max_ctas=MAX_CTAS)
    on_gpu = speaks("nccl", group=group)
    # The host reads these bytes. Over NCCL it would have to wait for the device.
    channel = Channel(peer, group, new_group(sorted(ends), purpose, backend="gloo") if on_gpu else group)
    token = torch.zeros(1, device="cuda" if on_gpu else "cpu")
    sends = (dist.get_rank() == ends[0]) == (what == "activations")
    (channel.send if sends else channel.receive)([token]).wait()
    return channel


def _line(channel: Channel, ends: tuple[int, int], messages: Messages) -> Line | None:
    """Return the slots of two neighbors, or None if collectives carry their messages."""
    if messages == "plain":
        return None
    reason = memory.why_not("cuda" if speaks("nccl", group=channel.group) else "cpu")
    # Both ends come to the same answer.
    reason = memory.unreachable(channel.group) if reason is None else reason
    if reason is None:
        return Line(channel.group)
    if messages == "symmetric":
        raise LayoutError(
            f"pipeline.messages='symmetric' cannot serve ranks {ends[0]} and {ends[1]}: it {reason}. Set "
            "pipeline.messages='auto', which takes plain messages there."
        )
    log.debug("messages between ranks %d and %d are plain: symmetric memory %s", *ends, reason)
    return None
