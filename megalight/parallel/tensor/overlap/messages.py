"""Shares sent as point-to-point messages, on any device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.tensor.overlap.rounds import Own, Round


class Messages:
    """A carrier that uses messages; all messages of a call are posted in the order in which they are needed.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def gather(self, share: Tensor, rounds: tuple[Round, ...], own: Own) -> GatheringMessages:
        """Start to gather all shares."""
        return GatheringMessages(self.group, share, rounds, own != "absent")

    def scatter(self, rows: int, width: int, like: Tensor, rounds: tuple[Round, ...]) -> ScatteringMessages:
        """Prepare to receive partial sums."""
        return ScatteringMessages(self.group, like.new_empty(self.group.size(), rows, width), rounds)


class GatheringMessages:
    """A gather whose messages are all posted at the beginning."""

    def __init__(self, group: ProcessGroup, share: Tensor, rounds: tuple[Round, ...], place_own: bool) -> None:
        self.share = share  # keeps the memory until it has been sent
        self.whole = share.new_empty(group.size() * len(share), *share.shape[1:])
        shares = self.whole.view(group.size(), *share.shape)
        # All ranks post the messages of a round in the same order. With another order, two ranks could each wait in a
        # send whose receiver has posted another one.
        self.works = [
            [exchange(group, share, behind, shares[ahead], ahead) for ahead, behind in each.pairs] for each in rounds
        ]
        if place_own:
            # After the messages are posted, so that they start first.
            shares[group.rank()].copy_(share)

    def wait(self, number: int) -> None:
        """Wait for the shares of a round, and until own ones have left."""
        wait(self.works[number])

    def finish(self) -> None:
        """Do nothing: the rounds have waited for everything."""


class ScatteringMessages:
    """Partial sums, ordered by sender."""

    def __init__(self, group: ProcessGroup, parts: Tensor, rounds: tuple[Round, ...]) -> None:
        self.group = group
        self.parts = parts
        self.rounds = rounds
        self.works: list[list[dist.Work]] = []
        self.leaving: list[Tensor] = []

    def place(self) -> Tensor:
        """Return the place of the own part."""
        return self.parts[self.group.rank()]

    def keep(self, own: Tensor) -> None:
        """Copy the own part to its place."""
        self.place().copy_(own)

    def send(self, number: int, piece: Tensor) -> None:
        """Start to send the rows of a piece, and to receive as many."""
        run, rows = self.group.size() // len(self.rounds), self.parts.shape[1]
        by_owner = piece.view(run, rows, -1)
        for ahead, behind in self.rounds[number].pairs:
            self.works.append(exchange(self.group, by_owner[ahead % run], ahead, self.parts[behind], behind))
        self.leaving.append(piece)  # keeps the memory until it has been sent

    def finish(self) -> Tensor:
        """Wait, and sum the parts in at least float32."""
        wait(self.works)
        self.leaving.clear()
        # In the order of ranks, not of arrival: every rank, and every run, adds in the same order.
        return torch.sum(self.parts, 0)


def exchange(group: ProcessGroup, leaving: Tensor, to: int, arriving: Tensor, source: int) -> list[dist.Work]:
    """Start to send one tensor and to receive another; ``to`` and ``source`` are ranks within the group."""
    send = dist.P2POp(dist.isend, leaving, group=group, group_peer=to)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=source)
    works: list[dist.Work] = dist.batch_isend_irecv([send, receive])
    return works


def wait(works: list[list[dist.Work]]) -> None:
    """Wait for messages to finish; on a GPU the current stream waits, not the host."""
    for each in works:
        for work in each:
            work.wait()
