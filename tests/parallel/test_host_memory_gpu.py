"""A tensor larger than the device, in managed memory."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from megalight.parallel.host_memory import ManagedMemory, advise, prefetch, why_not

pytestmark = pytest.mark.gpu
GIB = 2**30


def test_pools_come_and_go() -> None:
    """Each gives its memory back to the allocator, which all of them share."""
    device = torch.device("cuda", torch.cuda.current_device())
    if (reason := why_not(device)) is not None:
        pytest.skip(reason)
    for _ in range(2):
        memory = ManagedMemory(device)
        with memory.allocating():
            kept = torch.ones(2**22, device=device)
        assert kept.sum() == 2**22
        del kept, memory
        gc.collect()


def test_a_tensor_larger_than_the_device() -> None:
    """Every part is written and read on the device, with and without prefetching it.

    A device may hang when it is asked for more than it has free. So this runs only where somebody says that nobody else
    needs it.
    """
    if not os.environ.get("MEGALIGHT_TEST_BEYOND_DEVICE"):
        pytest.skip("it may hang the GPU; set MEGALIGHT_TEST_BEYOND_DEVICE=1 on a machine of your own")
    device = torch.device("cuda", torch.cuda.current_device())
    if (reason := why_not(device)) is not None:
        pytest.skip(reason)
    total = torch.cuda.get_device_properties(device).total_memory
    with open("/proc/meminfo") as file:
        host = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    parts = total // GIB + 4
    # What does not fit on the device lies on the host; the rest of the device may be in use by others.
    if host < parts * GIB // 2:
        pytest.skip(f"needs {parts // 2} GiB of host memory")
    memory = ManagedMemory(device)
    with memory.allocating():
        large = torch.empty(parts, GIB, dtype=torch.uint8, device=device)
    assert large.nbytes > total
    advise(large, "accessed_by", device)
    # Only some bytes of each part, or moving all pages would take minutes.
    seen = large[:, :: GIB // 64]
    seen.copy_(torch.arange(parts, dtype=torch.uint8, device=device)[:, None].expand_as(seen))
    sums = []
    for ahead in (False, True):
        for part in large:
            if ahead:
                prefetch(part[: GIB // 8], device)
            sums.append(part[:: GIB // 64].sum(dtype=torch.int64))
    prefetch(large[0, : GIB // 8], torch.device("cpu"))
    assert torch.stack(sums).tolist() == [64 * (number % 256) for number in range(parts)] * 2
    assert seen[0].sum() == 0
    del large, seen, part
    gc.collect()
    torch.cuda.synchronize()
