"""When a process can have memory that its peers reach, and when a group's ranks reach each other's."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalight.callbacks.meter import memory_gib
from megalight.errors import MegalightError
from megalight.parallel.graphs.fingerprint import Inspection
from megalight.parallel.mesh import shared_group
from megalight.parallel.peers import driver, memory
from megalight.parallel.peers.memory import MEETINGS, PeerMemory
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.support.workers import run


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(memory, "cuda_why_not", lambda device: None)
    monkeypatch.setattr(memory, "has", lambda package: True)
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace())
    return monkeypatch


def test_multicast_stays_off(able: pytest.MonkeyPatch) -> None:
    able.setenv(memory.NO_MULTICAST, "0")
    assert "set it to 1" in str(memory.why_not("cuda"))
    able.delenv(memory.NO_MULTICAST)
    assert memory.why_not("cuda") is None
    able.setenv(memory.BUFFERS, "NVSHMEM")
    assert "TORCH_SYMMMEM=NVSHMEM asks for others; unset it" in str(memory.why_not("cuda"))


def test_an_old_driver(able: pytest.MonkeyPatch) -> None:
    able.setattr(driver, "library", lambda: None)
    assert "cuStreamBatchMemOp_v2" in str(memory.why_not("cuda"))


def test_calls_that_fail_name_each_way_to_go_without(able: pytest.MonkeyPatch) -> None:
    able.setattr(driver, "library", lambda: SimpleNamespace(cuStreamBatchMemOp_v2=lambda *arguments: 801))
    stream: Any = SimpleNamespace(cuda_stream=0)
    with pytest.raises(
        MegalightError, match=r"failed with code 801 .*overlap='plain'.*'all_to_all'.*reductions='plain'"
    ):
        driver.raise_flags(stream, (0x7F00,))


@pytest.mark.parametrize(
    ("places", "links", "reason"),
    [
        ([("a", 0), ("a", 1)], True, None),
        ([("a", 0), ("b", 0)], True, "needs all 2 ranks on one host, and they are on 2"),
        ([("a", 0), ("a", 0)], True, "CUDA_VISIBLE_DEVICES"),
        ([("a", 0), ("a", 1)], False, "reach each other's memory"),
    ],
)
def test_who_reaches_whom(
    places: list[tuple[str, int]], links: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        def size(self) -> int:
            return 2

    def gather(found: list[Any], own: Any, group: Any) -> None:
        found[:] = places if isinstance(own, tuple) else [own, []]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: links)
    found = memory.unreachable(Group())  # type: ignore[arg-type]
    assert found is None if reason is None else reason in str(found)


def test_operations_are_laid_out_as_the_driver_reads_them() -> None:
    """``CUstreamBatchMemOpParams`` has 48 bytes: operation, address, value, flags, alias, each at a multiple of 8."""
    words = torch.frombuffer(bytearray(driver._waits((0x7F00, 0x7F04))), dtype=torch.int64).view(4, 6).tolist()
    wait, lower = [driver.WAIT, 0x7F00, 1, driver.EQUAL, 0, 0], [driver.WRITE, 0x7F00, 0, 0, 0, 0]
    assert words == [wait, lower, [wait[0], 0x7F04, *wait[2:]], [lower[0], 0x7F04, *lower[2:]]]


def test_symmetric_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For peaks of memory: torch's allocator does not know it."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 300)
    gpu = torch.device("cuda", 0)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    before = memory.held()
    made = memory.PeerMemory(group, exact=True)
    made._kept += [torch.zeros(1000, dtype=torch.uint8), torch.zeros(24, dtype=torch.uint8)]
    assert memory.held() == before + 1024
    assert memory.allocated(gpu) == before + 1124
    assert memory.peak_allocated(gpu) == memory_gib(gpu) * 2**30 == before + 1324
    del made
    gc.collect()
    assert memory.held() == before


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
        return MEETINGS.count, [reason for reason in inspection.reasons if "peers/memory.py" in reason]


def test_ranks_with_different_numbers_of_meetings() -> None:
    # Two of each memory on its own, of flags and of slots; then three with all: flags, slots, and larger slots.
    assert run(_meet, 3) == [(2 * 2 + 3, [])] * 3
