"""Ranks that took part in different numbers of meetings still meet."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megalight.parallel.graphs.inspection import Inspection
from megalight.parallel.groups import shared_group
from megalight.parallel.peers.memory import MEETINGS, PeerMemory
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.support.workers import run


def _meet() -> tuple[int, list[str]]:
    """Meet alone as often as the rank says, then with all. Return the number of meetings, and what is noted of them."""
    rank = dist.get_rank()
    with symmetric_on_cpu(), Inspection(torch.device("cpu")) as inspection:
        group = shared_group(range(dist.get_world_size()), "meetings")
        for size in range(1, rank + 1):
            PeerMemory(shared_group((rank,), "alone")).reserve(size)
        memory = PeerMemory(group)
        memory.reserve(64)
        memory.reserve(1024)
        # What the stand-in itself does is in another file.
        return MEETINGS.count, [reason for reason in inspection.reasons if "rendezvous.py" in reason]


def test_ranks_with_different_numbers_of_meetings() -> None:
    # Two of each memory on its own, of flags and of slots; then three with all: flags, slots, and larger slots.
    assert run(_meet, 3) == [(2 * 2 + 3, [])] * 3
