"""Calls of the CUDA driver that torch lacks: flags in memory that a stream raises or waits for, and plain copies.

A flag is a 32-bit word that holds 0 or 1. The stream's front end handles it (``cuStreamBatchMemOp``): there is no
kernel, so it needs no multiprocessor, and a flag may lie in a peer's memory. Copies go to a copy engine. Everything
here is queued on a stream and returns at once; a CUDA graph records it like any other work.

Waits are for flags that have been raised by then. Where one is not, the GPU sets the stream aside and looks again only
0.5 to 1.4 ms later (measured on an H200, flags raised by a peer); :mod:`.spin` waits for those.

A stream that waits may hold up other streams of its device: they share hardware queues
(``CUDA_DEVICE_MAX_CONNECTIONS``). So every flag must be raised by work that its rank queues *before* any wait of its
own that could depend on the waiting rank. Then all ranks come to an end even if each had one queue only.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.errors import MegalightError

LIBRARY = "libcuda.so.1"
WAIT, WRITE = 1, 2
"""Of ``CUstreamBatchMemOpType``: 32-bit values."""
EQUAL = 1
"""Of ``CUstreamWaitValue_flags``."""


class Operation(ctypes.Structure):
    """``CUstreamBatchMemOpParams``."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


@cache
def library() -> Any:
    """The CUDA driver, or None where it lacks a function that is used here."""
    handle, size, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    try:
        found = ctypes.CDLL(LIBRARY)
        found.cuStreamBatchMemOp_v2.argtypes = (handle, word, ctypes.c_void_p, word)
        found.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, size, handle)
    except (OSError, AttributeError):
        return None
    return found


def why_not() -> str | None:
    """Why nothing here works on this machine, or None."""
    return None if library() is not None else f"needs {LIBRARY} of CUDA 12 or newer, with cuStreamBatchMemOp_v2"


def wait(stream: torch.cuda.Stream, flags: tuple[int, ...]) -> None:
    """``stream`` waits until every flag is raised, and lowers it.

    Args:
        flags: addresses on this device.
    """
    _batch(stream, _waits(flags))


def raise_flags(stream: torch.cuda.Stream, flags: tuple[int, ...]) -> None:
    """Raise flags once all that ``stream`` holds so far is done, and visible to other devices.

    Args:
        flags: addresses on this device or on peers.
    """
    _batch(stream, _writes(flags))


def copy(stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> None:
    """Copy contiguous tensors of equal size on ``stream``; either may lie in a peer's memory."""
    _check(
        library().cuMemcpyDtoDAsync_v2(target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream),
        "cuMemcpyDtoDAsync",
    )


@lru_cache(maxsize=4096)
def _waits(flags: tuple[int, ...]) -> ctypes.Array[Operation]:
    pairs = [(Operation(WAIT, flag, 1, EQUAL), Operation(WRITE, flag, 0)) for flag in flags]
    return (Operation * (2 * len(flags)))(*[operation for pair in pairs for operation in pair])


@lru_cache(maxsize=4096)
def _writes(flags: tuple[int, ...]) -> ctypes.Array[Operation]:
    return (Operation * len(flags))(*[Operation(WRITE, flag, 1) for flag in flags])


def _batch(stream: torch.cuda.Stream, operations: ctypes.Array[Operation]) -> None:
    _check(library().cuStreamBatchMemOp_v2(stream.cuda_stream, len(operations), operations, 0), "cuStreamBatchMemOp")


def _check(code: int, call: str) -> None:
    if code:
        raise MegalightError(
            f"the CUDA driver's {call} failed with code {code} (CUresult in cuda.h). Choose overlap='plain' to go "
            "without it, and report the driver's version."
        )
