"""CUDA driver calls that torch lacks: flags in memory that a stream raises or waits for, and plain copies.

A flag is a 32-bit word that holds 0 or 1. The stream's front end handles it (``cuStreamBatchMemOp``). There is no
kernel, so it needs no SM, and a flag may lie in a peer's memory. Copies run on a copy engine. All calls
here queue work on a stream and return at once. A CUDA graph records them like any other work.

Wait here only for flags that should already be raised. If a flag is not, the GPU suspends the stream and checks again
only 0.5 to 1.4 ms later (measured on an H200, flags raised by a peer). Use :mod:`.spin` to wait for later flags.

A waiting stream may block other streams of its device, because they share hardware queues
(``CUDA_DEVICE_MAX_CONNECTIONS``). So a rank must queue the work that raises a flag *before* any wait of its own that
could depend on the rank that waits for this flag. Then there is no deadlock, even if each rank had only one queue.
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
"""Values of ``CUstreamBatchMemOpType`` for 32-bit words."""
EQUAL = 1
"""Value of ``CUstreamWaitValue_flags``."""


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
    """Return the CUDA driver, or None if it lacks a function that is used here."""
    handle, size, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    # Loaded at the first call: a machine without a GPU imports this module, too.
    try:
        found = ctypes.CDLL(LIBRARY)
        found.cuStreamBatchMemOp_v2.argtypes = (handle, word, ctypes.c_void_p, word)
        found.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, size, handle)
    except (OSError, AttributeError):
        return None
    return found


def why_not() -> str | None:
    """Return why this module does not work on this machine, or None."""
    return None if library() is not None else f"needs {LIBRARY} of CUDA 12 or newer, with cuStreamBatchMemOp_v2"


def wait(stream: torch.cuda.Stream, flags: tuple[int, ...]) -> None:
    """Let ``stream`` wait until every flag is raised, then lower the flags.

    Args:
        flags: addresses on this device.
    """
    _batch(stream, _waits(flags))


def raise_flags(stream: torch.cuda.Stream, flags: tuple[int, ...]) -> None:
    """Raise flags after all work that ``stream`` holds so far is done and visible to other devices.

    Args:
        flags: addresses on this device or on peers.
    """
    _batch(stream, _writes(flags))


def copy(stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> None:
    """Copy contiguous tensors of equal size on ``stream``; either may lie in a peer's memory."""
    _check(
        # Not `Tensor.copy_`, which may run a kernel instead of a copy engine.
        library().cuMemcpyDtoDAsync_v2(target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream),
        "cuMemcpyDtoDAsync",
    )


# Cached: addresses repeat from step to step, and the host would build the array for every layer.
@lru_cache(maxsize=4096)
def _waits(flags: tuple[int, ...]) -> ctypes.Array[Operation]:
    # Lowered by the waiter, in stream order: the flag is ready for its next use without another message.
    pairs = [(Operation(WAIT, flag, 1, EQUAL), Operation(WRITE, flag, 0)) for flag in flags]
    return (Operation * (2 * len(flags)))(*[operation for pair in pairs for operation in pair])


@lru_cache(maxsize=4096)
def _writes(flags: tuple[int, ...]) -> ctypes.Array[Operation]:
    return (Operation * len(flags))(*[Operation(WRITE, flag, 1) for flag in flags])


def _batch(stream: torch.cuda.Stream, operations: ctypes.Array[Operation]) -> None:
    # One call for several flags, as each call costs the host time.
    _check(library().cuStreamBatchMemOp_v2(stream.cuda_stream, len(operations), operations, 0), "cuStreamBatchMemOp")


def _check(code: int, call: str) -> None:
    if code:
        raise MegalightError(
            f"the CUDA driver's {call} failed with code {code} (CUresult in cuda.h). Go without it: choose "
            "TensorOptions(overlap='plain'), ExpertOptions(dispatcher='all_to_all'), PipelineOptions(messages='plain') "
            "and data_parallel.advanced gathers='plain', reductions='plain'. Report the driver's version."
        )
