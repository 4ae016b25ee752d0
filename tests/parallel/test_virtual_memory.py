"""Memory that comes and goes at fixed addresses, by a driver that counts, and forbids what the true one forbids."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel import virtual_memory
from megalight.parallel.virtual_memory import AccessDescriptor, AllocationProperties, VirtualMemory, why_not
from tests.support.fake_driver import PAGE, FakeDriver, fake_driver

CPU = torch.device("cpu")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with fake_driver(tmp_path, monkeypatch) as found:
        yield found


def test_structures_are_those_of_the_header(driver: FakeDriver) -> None:
    sizes = driver.number("sizes", 7)
    assert sizes[:2] == [ctypes.sizeof(AllocationProperties), ctypes.sizeof(AccessDescriptor)] == [32, 12]
    names = ("location", "win32_metadata", "compression", "usage")
    assert sizes[2:6] == [getattr(AllocationProperties, name).offset for name in names]
    assert sizes[6] == AccessDescriptor.flags.offset


def test_addresses_stay_and_bytes_come_back(driver: FakeDriver) -> None:
    memory = VirtualMemory(CPU)
    tensors = [memory.empty((3, 5), torch.float32), memory.empty((PAGE, 2), torch.bfloat16)]
    assert [(tuple(each.shape), each.dtype) for each in tensors] == [
        ((3, 5), torch.float32),
        ((PAGE, 2), torch.bfloat16),
    ]
    assert driver.mapped == 5 * PAGE
    addresses = [each.data_ptr() for each in tensors]
    for turn in range(3):
        for each in tensors:
            assert each.isnan().all(), "the driver's garbage"
            each.fill_(turn)
            assert (each == turn).all()
        memory.restore()  # nothing happens
        assert (tensors[0] == turn).all()
        memory.release()
        memory.release()
        assert driver.mapped == driver.handles == 0
        memory.restore()
    assert [each.data_ptr() for each in tensors] == addresses
    assert driver.mistakes == 0


def test_memory_ends_with_its_last_tensor(driver: FakeDriver) -> None:
    memory = VirtualMemory(CPU)
    first, second = memory.empty((4,), torch.int64), memory.empty((4,), torch.int64)
    del memory, first
    gc.collect()
    assert driver.mapped == driver.reserved == PAGE
    second.zero_()
    part = second[1:]
    del second
    gc.collect()
    assert part.tolist() == [0, 0, 0]
    del part
    gc.collect()
    memory = VirtualMemory(CPU)
    kept = memory.empty((4,), torch.int64)
    memory.release()
    del memory, kept
    gc.collect()
    assert (driver.mapped, driver.reserved, driver.handles, driver.mistakes) == (0, 0, 0, 0)


def test_all_comes_back_or_nothing(driver: FakeDriver) -> None:
    memory = VirtualMemory(CPU)
    tensors = [memory.empty((PAGE,), torch.uint8) for _ in range(4)]
    driver.limit = 68 * PAGE
    with pytest.raises(torch.OutOfMemoryError, match=f"cpu has less than {65 * PAGE} bytes free"):
        memory.empty((64 * PAGE + 1,), torch.uint8)
    assert driver.emptied == 1
    memory.release()
    for limit in (0, 2, 3):
        driver.limit = limit * PAGE
        with pytest.raises(torch.OutOfMemoryError, match=f"cpu has less than {4 * PAGE} bytes free"):
            memory.restore()
        assert driver.mapped == driver.handles == 0
    driver.frees = 2 * PAGE  # torch's unused memory makes room
    memory.restore()
    tensors[3].zero_()
    memory.release()
    for call in ("map", "access"):
        driver.fail(call)
        with pytest.raises(MegalightError, match=f"cuMem(Map|SetAccess) failed with code {driver.CODE}"):
            memory.restore()
        assert driver.mapped == driver.handles == 0
        driver.fail(None)
    memory.restore()
    assert driver.mapped == 4 * PAGE
    assert driver.mistakes == 0


def test_reasons(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    own, device = driver.why_not, torch.device("cuda:1")
    monkeypatch.setattr(virtual_memory, "why_not", why_not)
    assert own(CPU) == "it needs a GPU, not cpu"
    assert own(device) is None
    with pytest.raises(ConfigurationError, match=r"for cpu: it needs a GPU, not cpu\. Use torch's own memory"):
        VirtualMemory(CPU)
    driver.supported = 0
    assert own(device) == "the driver has no virtual memory management for cuda:1"
    monkeypatch.setattr(virtual_memory, "LIBRARY", "libnothing.so")
    virtual_memory.library.cache_clear()
    assert own(device) == "libnothing.so is not there, or lacks virtual memory management"
