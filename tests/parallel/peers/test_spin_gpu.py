"""The kernels that raise flags and wait for them, on one device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from megalight.errors import MegalightError
from megalight.parallel.peers import driver
from megalight.parallel.peers.memory import SLOTS, Flag
from megalight.parallel.peers.spin import Watch
from tests.parallel.peers.test_spin import Flags

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 2, 6, 7, 8, 15])
def test_raised_flags_are_seen_and_lowered(count: int) -> None:
    from megalight.parallel.peers import spin

    words = torch.zeros(2 * count, dtype=torch.int32, device="cuda")
    flags = tuple(words.data_ptr() + 8 * place for place in range(count))  # every second word
    spin.raise_flags(flags)
    assert words.tolist() == [1, 0] * count
    for first in range(0, count, 16):
        spin.wait(flags[first : first + 16])
    assert not words.any()


def test_flags_are_raised_in_a_graph() -> None:
    from megalight.parallel.peers import spin

    words = torch.zeros(4, dtype=torch.int32, device="cuda")
    flags = tuple(words.data_ptr() + 4 * place for place in (0, 2, 3))
    spin.raise_flags(flags)  # compiled before the capture
    words.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spin.raise_flags(flags)
    assert not words.any()
    for _ in range(2):
        words.zero_()
        graph.replay()
        assert words.tolist() == [1, 0, 1, 1]


def test_a_wait_for_a_peer_that_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from megalight.parallel.peers import spin

    words = torch.zeros(SLOTS * len(Flag) * 4, dtype=torch.int32, device="cuda")
    memory: Any = Flags(rank=1, size=4, base=words.data_ptr())
    beside = torch.zeros_like(words)
    watch = Watch(memory, limit=0.2, also=Flags(rank=1, size=4, base=beside.data_ptr()))
    table = words.view(SLOTS, len(Flag), 4)
    flags = tuple(memory.flag(1, 1, Flag.READY, rank) for rank in (0, 2, 3))
    table[1, Flag.READY] = 1
    spin.wait_with(watch, flags)
    torch.cuda.synchronize()
    assert table[1, Flag.READY].tolist() == [0, 1, 0, 0], "seen flags are lowered, and no other"
    watch.check()

    table[1, Flag.READY] = torch.tensor([1, 0, 0, 1], dtype=torch.int32)
    torch.cuda.synchronize()
    begun = time.monotonic()
    spin.wait_with(watch, flags)
    torch.cuda.synchronize()
    assert 0.15 < time.monotonic() - begun < 5
    assert watch.missing.tolist() == [0, 0, 1, 0]
    assert table[:, Flag.FREE].tolist() == [[0, 0, 1, 0]] * SLOTS
    assert beside.view(SLOTS, len(Flag), 4)[:, Flag.FREE].tolist() == [[0, 0, 1, 0]] * SLOTS
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [8, 9, 10, 11])
    with pytest.raises(MegalightError, match=r"rank 9 waited 0.2 s for data of rank 10, in vain"):
        watch.check()
    # Later waits for it take no time, and let go what the driver's wait holds.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    watch.limit = 1000.0
    for slot in (0, 1, 0, 1):
        driver.wait(stream, (memory.flag(1, slot, Flag.FREE, 2),))
        table[slot, Flag.READY, 0] = table[slot, Flag.READY, 3] = 1
        spin.wait_with(watch, tuple(memory.flag(1, slot, Flag.READY, rank) for rank in (0, 2, 3)))
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert time.monotonic() - begun < 30
