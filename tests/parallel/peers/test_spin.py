"""Who is missing is named, and a wait is as long as collectives of the group wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalight.errors import MegalightError
from megalight.parallel.peers.memory import SLOTS, Flag, PeerMemory
from megalight.parallel.peers.spin import DEFAULT_LIMIT, Watch, limit_of
from tests.support.workers import run


class Flags(PeerMemory):
    """The places of flags, without memory."""

    def __init__(self, rank: int, size: int, base: int) -> None:
        self.rank, self.size, self._flags, self.slots = rank, size, [base] * size, SLOTS
        self.group: Any = None
        self.others = tuple(other for other in range(size) if other != rank)


def test_missing_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(Flags(1, 4, 0x7F00), limit=2.5)
    watch.check()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6, 7])
    watch.missing[torch.tensor([0, 3])] = 1
    with pytest.raises(MegalightError, match=r"rank 5 waited 2.5 s for data of rank 4, 7, in vain.*first error"):
        watch.check()


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("ranks", [(0, 2, 3), (2, 3), (3,)])
def test_notes_and_flags_belong_to_the_peer_of_the_first_flag(slot: int, ranks: tuple[int, ...]) -> None:
    memory = Flags(1, 4, 0x7F00)
    watch = Watch(memory, limit=1.0)
    flags = tuple(memory.flag(1, slot, Flag.READY, rank) for rank in ranks)
    notes, free, same, stride = watch.places(flags, memory)
    assert notes == watch.missing[ranks[0] :].data_ptr()
    assert same == free
    for place in (0, 1):
        assert free + 4 * place * stride == memory.flag(1, place, Flag.FREE, ranks[0])
    # Either memory unlocks the other one, as soon as that has flags.
    other = Flags(1, 4, 0xA000)
    both = Watch(memory, limit=1.0, also=other)
    assert both.places(flags, memory)[1:3] == (free, other.flag(1, 0, Flag.FREE, ranks[0]))
    back = tuple(other.flag(1, slot, Flag.READY, rank) for rank in ranks)
    assert both.places(back, other)[1:3] == (other.flag(1, 0, Flag.FREE, ranks[0]), free)
    other._flags = []
    assert both.places(flags, memory)[1:3] == (free, free)


def _limit(seconds: int) -> tuple[float, float]:
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    return limit_of(group), limit_of(object())  # type: ignore[arg-type]


def test_the_limit_is_that_of_collectives() -> None:
    assert run(_limit, 2, 77) == [(77.0, DEFAULT_LIMIT)] * 2
