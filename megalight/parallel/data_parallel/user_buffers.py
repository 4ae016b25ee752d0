"""Buffers of messages that NCCL knows, so that it sends from them and receives into them without copies of its own."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError
from megalight.parallel.ending import FAILED
from megalight.parallel.groups import speaks

Registration = Literal["off", "local", "symmetric"]
OLDEST = {"local": (2, 19), "symmetric": (2, 27)}
"""The first NCCL with each kind of registration."""


def why_not(kind: Registration, device: torch.device) -> str | None:
    """Return why buffers on a device cannot be registered in this process, or None. No message is sent."""
    if kind == "off":
        return None
    if device.type != "cuda":
        return f"it needs GPUs, and the buffers are on {device}"
    if not dist.is_initialized() or not speaks("nccl"):
        return "it needs the backend nccl"
    methods = [getattr(dist.ProcessGroupNCCL, name, None) for name in ("register_mem_pool", "mem_allocator")]
    # Bound in C++, so the text that pybind writes is all that names the arguments.
    if None in methods or (kind == "symmetric" and "symm" not in str(methods[0].__doc__)):
        return f"torch {torch.__version__} cannot register pools of memory this way"
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if (found := version[:2]) < OLDEST[kind]:
        return f"it needs NCCL {'.'.join(map(str, OLDEST[kind]))} or newer, and this is {'.'.join(map(str, found))}"
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return "NCCL_CUMEM_ENABLE=0 takes NCCL's allocator away; unset it"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            return f"{name} asks for expandable segments, which grow after they are registered; leave that out"
    return None


class UserBuffers:
    """A pool of NCCL's memory for the flat buffers of an engine, registered with the groups that send them.

    ``local``: each rank registers its own buffers, and messages inside a host need fewer multiprocessors and no copies.
    ``symmetric``: all ranks register them together as windows, so that kernels of one rank reach the buffers of others.
    Neither switches NVLink multicast on: ``NCCL_NVLS_ENABLE`` of the environment decides that.

    Args:
        kind: ``off`` leaves everything to torch's ordinary allocator.
        device: of the buffers.

    Raises:
        ConfigurationError: it is not available here.
    """

    def __init__(self, kind: Registration, device: torch.device) -> None:
        if (reason := why_not(kind, device)) is not None:
            raise ConfigurationError(f"data_parallel.nccl_ub={kind!r}: {reason}. Or use 'off'.")
        self.kind = kind
        self.device = device
        self._pool: torch.cuda.MemPool | None = None
        self._release: Any = None
        if kind != "off":
            assert dist.group.WORLD is not None
            self._pool = torch.cuda.MemPool(_backend(dist.group.WORLD, device).mem_allocator)

    def allocating(self) -> AbstractContextManager[object]:
        """Make tensors in the pool inside; all ranks make the same ones, as windows are symmetric."""
        return nullcontext() if self._pool is None else torch.cuda.use_mem_pool(self._pool, self.device)

    def register(self, groups: Iterable[ProcessGroup | None]) -> None:
        """Register what is in the pool with groups, after all of it is there; all their members call this together."""
        distinct = [group for group in dict.fromkeys(groups) if group is not None]
        if self._pool is None or not distinct:
            return
        for group in distinct:
            # NCCL connects a group with its first message, and refuses to register memory with one that is not.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        backends = [_backend(group, self.device) for group in distinct]
        for backend in backends:
            # Not `symm=False`: older versions of torch have local registration only, and no such argument.
            backend.register_mem_pool(self._pool, **({"symm": True} if self.kind == "symmetric" else {}))
        self._release = weakref.finalize(self, _deregister, self._pool, backends, self.device)
        # In the order of atexit, and not in that of finalizers, which may come after the process group has ended.
        self._release.atexit = False
        atexit.register(self._release)

    def release(self) -> None:
        """End the registration, once; the buffers stay usable."""
        if self._release is not None:
            self._release()
            atexit.unregister(self._release)
            self._release = None


def _backend(group: ProcessGroup, device: torch.device) -> Any:
    return group._get_backend(device)


def _deregister(pool: torch.cuda.MemPool, backends: list[Any], device: torch.device) -> None:
    # A group that ends with windows aborts. After an error it is aborted in any case, and messages may hang.
    if FAILED.is_set() or not dist.is_initialized():
        return
    torch.cuda.synchronize(device)  # messages may still use the buffers
    for backend in backends:
        backend.deregister_mem_pool(pool)
