"""Memory beyond the device: pinned host memory, a pool of it in stream order, and CUDA's managed memory.

The pages of managed memory move between the device and the host::

    memory = ManagedMemory(device)
    with memory.allocating():
        cache = torch.empty(2**38, dtype=torch.uint8, device=device)  # larger than the device
    prefetch(cache[:2**30], device)  # its pages come before a kernel asks for them

A kernel that meets a page that is not there waits for it. So memory that is used in turn should be prefetched in turn.
Pages of which nobody needs the values are discarded, where the driver can (CUDA 13): nothing is copied.

The driver lets go of a page's memory on the device when another allocation needs it, and then at once if the page is on
the host or discarded. Until then ``torch.cuda.mem_get_info`` counts it as in use.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megalight.errors import ConfigurationError, MegalightError


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory for values of a device: pinned for a GPU, which then copies without the host's help."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


FIT = 2
"""A block serves for values of half of its size, too. So micro-batches of other lengths need no memory of their own."""


class HostPool:
    """Blocks of pinned memory that a device writes and reads again and again.

    The host prepares a step while the device is still in the one before. Torch's own pool gives pinned memory out again
    only when the device has really made the copies, so a step that is prepared early pins as much memory once more.
    Here a block goes to its next user at once, with a function that lets a stream wait for the last copy.

    Args:
        device: where the copies are made.

    Attributes:
        pinned: bytes that were taken from the host so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = 0
        self._free: dict[int, deque[tuple[Tensor, Callable[[], None] | None]]] = {}

    def take(self, size: int) -> Tensor:
        """Return a block of at least ``size`` bytes. The current stream waits until nobody reads it any more."""
        fitting = [free for free, blocks in self._free.items() if blocks and size <= free <= FIT * size]
        if not fitting:
            self.pinned += size
            return host_memory((size,), torch.uint8, self.device)
        block, wait = self._free[min(fitting)].popleft()
        if wait is not None:
            wait()
        return block

    def give(self, block: Tensor, wait: Callable[[], None] | None) -> None:
        """Take a block back.

        Args:
            wait: lets the then current stream wait for the last copy; None on a CPU.
        """
        self._free.setdefault(block.numel(), deque()).append((block, wait))

    def clear(self) -> None:
        """Forget the blocks that nobody uses. Torch's own pool has them then."""
        self._free.clear()


LIBRARY = "libcuda.so.1"
CONCURRENT = 89
"""``CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS``: the host may touch pages while the device computes."""
ADVICE = {"preferred_location": 3, "accessed_by": 5}
"""``CUmem_advise``."""
COMPILE_SECONDS = 60.0

# In C: the allocator of torch calls it with its lock held, and a function in Python would wait for the interpreter's.
SOURCE = r"""
#include <dlfcn.h>
#include <stddef.h>

static void *function(const char *name) {
    void *library = dlopen(LIBRARY, RTLD_NOW);
    return library ? dlsym(library, name) : NULL;
}

void *managed_alloc(size_t size, int device, void *stream) {
    static int (*allocate)(unsigned long long *, size_t, unsigned);
    unsigned long long address = 0;
    if (!allocate) *(void **)&allocate = function("cuMemAllocManaged");
    if (!allocate || allocate(&address, size, 1)) return NULL; /* 1: CU_MEM_ATTACH_GLOBAL */
    return (void *)address;
}

void managed_free(void *address, size_t size, int device, void *stream) {
    static int (*release)(unsigned long long);
    if (!release) *(void **)&release = function("cuMemFree_v2");
    if (release) release((unsigned long long)address);
}
"""


class Location(ctypes.Structure):
    """``CUmemLocation``, which CUDA 13 passes by value where older drivers took a number."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


DEVICE, HOST = 1, 2
"""``CUmemLocationType``."""
ADDRESS, SIZE, WORD, STREAM = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p
LOCATED: dict[str, tuple[Any, ...]] = {
    "cuMemPrefetchAsync_v2": (ADDRESS, SIZE, Location, WORD, STREAM),
    "cuMemAdvise_v2": (ADDRESS, SIZE, ctypes.c_int, Location),
}
ORDINAL: dict[str, tuple[Any, ...]] = {
    "cuMemPrefetchAsync": (ADDRESS, SIZE, ctypes.c_int, STREAM),
    "cuMemAdvise": (ADDRESS, SIZE, ctypes.c_int, ctypes.c_int),
}
"""Calls of drivers before CUDA 12.2, with -1 for the host. A location passed to them would be read as nonsense."""


NOT_SUPPORTED = 801
"""``CUDA_ERROR_NOT_SUPPORTED``."""
RANGES = (ctypes.POINTER(ADDRESS), ctypes.POINTER(SIZE), SIZE)
LOCATIONS = (ctypes.POINTER(Location), ctypes.POINTER(SIZE), SIZE)
BATCHED: dict[str, tuple[Any, ...]] = {
    "cuMemPrefetchBatchAsync": (*RANGES, *LOCATIONS, ctypes.c_uint64, STREAM),
    "cuMemDiscardBatchAsync": (*RANGES, ctypes.c_uint64, STREAM),
    "cuMemDiscardAndPrefetchBatchAsync": (*RANGES, *LOCATIONS, ctypes.c_uint64, STREAM),
}
"""Calls of drivers since CUDA 13, for several ranges of memory at once."""


@cache
def library() -> Any:
    """Return the CUDA driver with the argument types of its calls, or None.

    ``located`` says which form some have, and ``batched`` whether there are those for several ranges.
    """
    try:
        found: Any = ctypes.CDLL(LIBRARY)
        # By what the driver has, not by the version of CUDA that torch was built with: the two may differ.
        found.located = hasattr(found, "cuMemPrefetchAsync_v2") and hasattr(found, "cuMemAdvise_v2")
        found.batched = all(hasattr(found, name) for name in BATCHED)
        calls = (LOCATED if found.located else ORDINAL) | (BATCHED if found.batched else {})
        for name, types in calls.items():
            getattr(found, name).argtypes = types
        found.cuDeviceGetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    except (OSError, AttributeError):
        return None
    return found


def why_not(device: torch.device) -> str | None:
    """Return why a device has no managed memory that it and the host may use side by side, or None."""
    if device.type != "cuda":
        return f"it needs a GPU, not {device}"
    driver = library()
    if driver is None:
        return f"{LIBRARY} is not there, or lacks managed memory"
    if not attribute_of(driver, device, CONCURRENT):
        return f"the host and {device} cannot use managed memory at the same time (concurrentManagedAccess is 0)"
    return None if shutil.which("cc") else "it needs a C compiler (cc) for its allocator; install gcc"


class ManagedMemory:
    """A pool of managed memory for tensors of one device; together they may be larger than the device.

    Drop the tensors before the pool.

    Args:
        device: the device whose tensors these are.

    Raises:
        ConfigurationError: the device has no such memory; the reason is told.
        MegalightError: the allocator cannot be compiled.
    """

    def __init__(self, device: torch.device) -> None:
        if (reason := why_not(device)) is not None:
            raise ConfigurationError(f"managed memory for {device}: {reason}. Use the device's own memory.")
        self.device = device
        self.pool = torch.cuda.MemPool(_allocator().allocator())

    def allocating(self) -> AbstractContextManager[object]:
        """Allocate tensors of the device in managed memory inside."""
        return torch.cuda.use_mem_pool(self.pool, self.device)


@cache
def _allocator() -> Any:
    """Return the allocator of all pools. It is never dropped: pools give memory back to it when they end."""
    with tempfile.TemporaryDirectory() as folder:  # a loaded library needs its file no longer
        path = compile_allocator(Path(folder))
        return torch.cuda.memory.CUDAPluggableAllocator(str(path), "managed_alloc", "managed_free")


def compile_allocator(folder: Path) -> Path:
    """Compile the allocator into a folder, and return the shared library.

    Raises:
        MegalightError: the compiler fails or takes too long.
    """
    source, target = folder / "managed.c", folder / "managed.so"
    source.write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", "-O1", f'-DLIBRARY="{LIBRARY}"', str(source), "-o", str(target), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise MegalightError(f"the allocator of managed memory could not be compiled: {said}") from error
    return target


def prefetch(tensor: Tensor, where: torch.device, stream: torch.cuda.Stream | None = None) -> None:
    """Start to move the pages of a contiguous tensor to a device or to the host.

    Args:
        tensor: in managed memory.
        where: a GPU, or ``torch.device("cpu")``.
        stream: the move comes behind its work; None: the current one.
    """
    driver, handle = library(), (stream or torch.cuda.current_stream(tensor.device)).cuda_stream
    if driver.located:
        code = driver.cuMemPrefetchAsync_v2(tensor.data_ptr(), tensor.nbytes, _location(where), 0, handle)
    else:
        code = driver.cuMemPrefetchAsync(tensor.data_ptr(), tensor.nbytes, ordinal_of(where), handle)
    check_result(code, "cuMemPrefetchAsync")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def move_pages(tensors: Sequence[Tensor], where: torch.device, keep: bool = True) -> None:
    """Start to move the pages of contiguous tensors of one GPU to a device or to the host, behind the current stream.

    Args:
        tensors: in managed memory.
        where: a GPU, or ``torch.device("cpu")``.
        keep: False: their values are of no use any more, and are not copied if the driver can discard them.
    """
    if not tensors:
        return
    driver, current = library(), torch.cuda.current_stream(tensors[0].device)
    if driver.batched:
        code = _move_together(driver, tensors, where, keep, current)
        if code != NOT_SUPPORTED:
            check_result(code, "batch of moves of memory")
            return
        # The library is newer than the driver in the kernel.
        driver.batched = False
    for tensor in tensors:
        prefetch(tensor, where, current)


def _move_together(
    driver: Any, tensors: Sequence[Tensor], where: torch.device, keep: bool, current: torch.cuda.Stream
) -> int:
    # The driver takes no default stream.
    side, count = _side_stream(current.device), len(tensors)
    side.wait_stream(current)
    ranges = (
        (ADDRESS * count)(*(tensor.data_ptr() for tensor in tensors)),
        (SIZE * count)(*(tensor.nbytes for tensor in tensors)),
        count,
    )
    target = (ctypes.pointer(_location(where)), (SIZE * 1)(0), 1)
    code: int
    if keep:
        code = driver.cuMemPrefetchBatchAsync(*ranges, *target, 0, side.cuda_stream)
    elif where.type == "cpu":
        code = driver.cuMemDiscardBatchAsync(*ranges, 0, side.cuda_stream)
    else:
        code = driver.cuMemDiscardAndPrefetchBatchAsync(*ranges, *target, 0, side.cuda_stream)
    current.wait_stream(side)
    return code


def advise(tensor: Tensor, advice: Literal["preferred_location", "accessed_by"], where: torch.device) -> None:
    """Tell the driver where the pages of a contiguous tensor should stay, or who will read them without moving them."""
    driver = library()
    if driver.located:
        code = driver.cuMemAdvise_v2(tensor.data_ptr(), tensor.nbytes, ADVICE[advice], _location(where))
    else:
        code = driver.cuMemAdvise(tensor.data_ptr(), tensor.nbytes, ADVICE[advice], ordinal_of(where))
    check_result(code, "cuMemAdvise")


def _location(where: torch.device) -> Location:
    return Location(HOST, 0) if where.type == "cpu" else Location(DEVICE, ordinal_of(where))


def attribute_of(driver: Any, device: torch.device, number: int) -> int:
    """Return an attribute of a device, a ``CU_DEVICE_ATTRIBUTE_...``."""
    check_result(driver.cuInit(0), "cuInit")  # torch starts the driver only when it first uses a device
    value = ctypes.c_int(0)
    check_result(driver.cuDeviceGetAttribute(ctypes.byref(value), number, ordinal_of(device)), "cuDeviceGetAttribute")
    return value.value


def ordinal_of(where: torch.device) -> int:
    """Return the number by which the driver knows a device."""
    if where.type == "cpu":
        return -1  # `CU_DEVICE_CPU`
    return torch.cuda.current_device() if where.index is None else where.index


def check_result(code: int, call: str) -> None:
    """Check that a call of the driver succeeded.

    Raises:
        MegalightError: it did not.
    """
    if code:
        raise MegalightError(f"the CUDA driver's {call} failed with code {code} (CUresult in cuda.h).")
