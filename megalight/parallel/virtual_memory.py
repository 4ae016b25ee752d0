"""Memory of a GPU that is given back while its addresses stay: the CUDA driver's virtual memory management.

Addresses are reserved once. Physical memory is mapped there, unmapped, and mapped again::

    memory = VirtualMemory(device)
    cache = memory.empty((2**20, 128), torch.bfloat16)
    memory.release()  # others may have the bytes; nobody may touch `cache` now
    memory.restore()  # at the same addresses, with any values

So CUDA graphs, which hold addresses, stay valid. Unlike pages of managed memory (:mod:`.host_memory`), what is unmapped
is free at once, as ``torch.cuda.mem_get_info`` shows. Torch's own statistics do not count this memory. A tensor has its
own pages, of 2 MiB in general, and gives them back when it ends.

Calls and structures: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage

from megalight.errors import ConfigurationError
from megalight.parallel.host_memory import LIBRARY, Location, attribute_of, check_result, ordinal_of

SUPPORTED = 102
"""``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED``."""
PINNED, ON_DEVICE, READ_WRITE, MINIMUM = 1, 1, 3, 0
"""``CU_MEM_ALLOCATION_TYPE_PINNED``, ``CU_MEM_LOCATION_TYPE_DEVICE``, ``CU_MEM_ACCESS_FLAGS_PROT_READWRITE``, and
``CU_MEM_ALLOC_GRANULARITY_MINIMUM``."""
OUT_OF_MEMORY = 2
"""``CUDA_ERROR_OUT_OF_MEMORY``."""


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``, 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_metadata", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AccessDescriptor(ctypes.Structure):
    """``CUmemAccessDesc``, 12 bytes."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


ADDRESS, SIZE, HANDLE, FLAGS = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64
PROPERTIES = ctypes.POINTER(AllocationProperties)
CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(SIZE), PROPERTIES, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(ADDRESS), SIZE, SIZE, ADDRESS, FLAGS),
    "cuMemAddressFree": (ADDRESS, SIZE),
    "cuMemCreate": (ctypes.POINTER(HANDLE), SIZE, PROPERTIES, FLAGS),
    "cuMemRelease": (HANDLE,),
    "cuMemMap": (ADDRESS, SIZE, SIZE, HANDLE, FLAGS),
    "cuMemUnmap": (ADDRESS, SIZE),
    "cuMemSetAccess": (ADDRESS, SIZE, ctypes.POINTER(AccessDescriptor), SIZE),
}


@cache
def library() -> Any:
    """Return the CUDA driver with the argument types of its calls, or None if it lacks one."""
    try:
        found = ctypes.CDLL(LIBRARY)
        for name, types in CALLS.items():
            getattr(found, name).argtypes = types
    except (OSError, AttributeError):
        return None
    return found


def why_not(device: torch.device) -> str | None:
    """Return why a device has no memory that comes and goes at fixed addresses, or None."""
    if device.type != "cuda":
        return f"it needs a GPU, not {device}"
    driver = library()
    if driver is None:
        return f"{LIBRARY} is not there, or lacks virtual memory management"
    known = attribute_of(driver, device, SUPPORTED)
    return None if known else f"the driver has no virtual memory management for {device}"


class VirtualMemory:
    """Tensors of a GPU whose memory is released and mapped again, all of it together, at the same addresses.

    Args:
        device: the GPU.

    Attributes:
        page: bytes of a page.

    Raises:
        ConfigurationError: the driver lacks it; the reason is told.
    """

    def __init__(self, device: torch.device) -> None:
        if (reason := why_not(device)) is not None:
            raise ConfigurationError(f"virtual memory management for {device}: {reason}. Use torch's own memory.")
        self.device = device
        self._properties = AllocationProperties(type=PINNED, location=Location(ON_DEVICE, ordinal_of(device)))
        page = SIZE(0)
        code = library().cuMemGetAllocationGranularity(ctypes.byref(page), ctypes.byref(self._properties), MINIMUM)
        check_result(code, "cuMemGetAllocationGranularity")
        self.page: int = page.value
        self._ranges: WeakValueDictionary[int, _Range] = WeakValueDictionary()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor with any values. Its memory is rounded up to whole pages.

        Raises:
            torch.OutOfMemoryError: the device has too little memory.
        """
        torch.cuda.synchronize(self.device)  # makes the device's context current
        made = _Range(self.device, math.prod(shape) * dtype.itemsize, self.page, self._properties)
        made.map()
        self._ranges[made.address] = RANGES[made.address] = made
        return tensor_over(made).view(dtype).view(*shape)

    def adopt(self, storage: UntypedStorage) -> bool:
        """Return whether a storage lies in such memory, which then comes and goes with this, whoever made it."""
        found = RANGES.get(storage.data_ptr())
        if found is not None:
            self._ranges[found.address] = found
        return found is not None

    def release(self) -> None:
        """Give all memory back, once the device has done what it was asked for. A second call does nothing."""
        torch.cuda.synchronize(self.device)
        for each in self._ranges.values():
            each.unmap()

    def restore(self) -> None:
        """Map memory again, with any values. A second call does nothing.

        Raises:
            torch.OutOfMemoryError: the device has too little. All memory is released then.
        """
        torch.cuda.synchronize(self.device)  # makes the device's context current
        try:
            for each in self._ranges.values():
                each.map()
        except BaseException as error:
            self.release()
            if isinstance(error, torch.OutOfMemoryError):
                size = sum(each.size for each in self._ranges.values())
                raise torch.OutOfMemoryError(f"{self.device} has less than {size} bytes free.") from error
            raise


class _Range:
    """A range of reserved addresses; the memory there is mapped or not. It ends with the last tensor over it.

    Args:
        device: the device.
        used: bytes that a tensor needs.
        page: bytes of a page.
        properties: of the memory.

    Attributes:
        size: bytes of memory: whole pages.
    """

    def __init__(self, device: torch.device, used: int, page: int, properties: AllocationProperties) -> None:
        self.device, self.used, self.mapped = device, used, False
        self._driver, self._properties = library(), properties
        self.size, address = -(-used // page) * page, ADDRESS(0)
        code = self._driver.cuMemAddressReserve(ctypes.byref(address), self.size, 0, 0, 0)
        check_result(code, "cuMemAddressReserve")
        self.address: int = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.used,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def map(self) -> None:
        if self.mapped:
            return
        handle, driver = HANDLE(0), self._driver
        arguments = ctypes.byref(handle), self.size, ctypes.byref(self._properties), 0
        code = driver.cuMemCreate(*arguments)
        if code == OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # torch keeps memory that no tensor uses
            code = driver.cuMemCreate(*arguments)
        if code == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{self.device} has less than {self.size} bytes free.")
        check_result(code, "cuMemCreate")
        try:
            check_result(driver.cuMemMap(self.address, self.size, 0, handle, 0), "cuMemMap")
            self.mapped = True
        finally:
            # The mapping alone holds the memory: to unmap it frees it.
            driver.cuMemRelease(handle)
        access = AccessDescriptor(self._properties.location, READ_WRITE)
        check_result(driver.cuMemSetAccess(self.address, self.size, ctypes.byref(access), 1), "cuMemSetAccess")

    def unmap(self) -> None:
        if self.mapped:
            check_result(self._driver.cuMemUnmap(self.address, self.size), "cuMemUnmap")
            self.mapped = False

    def __del__(self) -> None:
        # The end of the process frees all.
        if hasattr(self, "address") and not sys.is_finalizing():
            torch.cuda.synchronize(self.device)
            self.unmap()
            self._driver.cuMemAddressFree(self.address, self.size)


RANGES: WeakValueDictionary[int, _Range] = WeakValueDictionary()
"""All of this process, by their addresses."""


def tensor_over(memory: _Range) -> Tensor:
    """Return the bytes of a range as a tensor, which keeps it alive."""
    found = torch.as_tensor(memory, device=memory.device)
    assert found.data_ptr() == memory.address, "torch copied it"
    return found
