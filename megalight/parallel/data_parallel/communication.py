"""Communication of the data-parallel engine: collectives or copy engines, side streams, NCCL user buffers."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError
from megalight.parallel.mesh import FAILED, uses_backend
from megalight.parallel.peers import memory

Transport: TypeAlias = Literal["plain", "symmetric", "auto"]


@dataclass(frozen=True)
class TransportChoice:
    """Decides the way of one kind of message. It is a value: what one group gets does not depend on those before it.

    Attributes:
        option: name of the option, for messages.
        way: its value: ``plain``, ``symmetric``, or ``auto``: copy engines where they are available.
        against: why ``auto`` does without copy engines whatever the machine; None: it does not.
    """

    option: str
    way: Transport
    against: str | None = None

    def why_not(self, device: torch.device) -> str | None:
        """Return why collectives carry all messages of a device; None: copy engines may.

        Raises:
            ConfigurationError: copy engines were asked for by name, and are not available.
        """
        if self.way == "plain":
            return "'plain' was asked for"
        return self.against or self._judge(memory.why_not(device.type))

    def why_not_over(self, group: ProcessGroup) -> str | None:
        """Return why collectives carry the messages of a group; None: copy engines do.

        Its ranks call this together, and get the same answer.

        Raises:
            ConfigurationError: copy engines were asked for by name, and are not available.
        """
        return self._judge(memory.unreachable(group))

    def describe(self, reasons: Sequence[str]) -> str:
        """Return the way that was chosen, and why.

        Args:
            reasons: why some messages do without copy engines, as the methods above gave them.
        """
        if reasons:
            return f"by collectives, for some ranks at least: {reasons[0]}"
        return "by copy engines, which leave all SMs to GEMMs: the GPUs reach each other's memory"

    def _judge(self, reason: str | None) -> str | None:
        if reason is not None and self.way == "symmetric":
            raise ConfigurationError(
                f"data_parallel.advanced.{self.option}='symmetric': it {reason}. Set "
                f"{self.option}='plain', or replicate, so that the ranks of a group are on one host."
            )
        return None if reason is None else f"the other way {reason}"


def side_stream(device: torch.device, needed: bool = True, urgent: bool = False) -> SideStream | None:
    """Return a stream beside the computation on ``device``; None on a CPU, where nothing runs beside it.

    Args:
        urgent: its kernels get SMs before those of other streams.
    """
    if device.type != "cuda" or not needed:
        return None
    return SideStream(torch.cuda.Stream(device, priority=-1 if urgent else 0))  # type: ignore[no-untyped-call]


class SideStream:
    """A stream for work that reads what the main stream computes, and knows which stream is the main one.

    Args:
        stream: the CUDA stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.device = stream.device
        self._main: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Make the current stream the main one: most gradients will come from it."""
        now = torch.cuda.current_stream(self.device)
        if self._main is not None and self._main != now:
            # Nobody has waited for gradients that the earlier main stream computed.
            self.stream.wait_stream(self._main)
        self._main = now

    def follow(self) -> None:
        """Wait here for a gradient that the current stream computes, if that is not the main one.

        Work that starts later waits for the stream that is current then, which is usually the main one.
        """
        now = torch.cuda.current_stream(self.device)
        if now != self._main:
            self.stream.wait_stream(now)
            # This gradient may be the last one that the work needs. The others may still be computed on the main
            # stream, and then nothing else waits for that one.
            if self._main is not None:
                self.stream.wait_stream(self._main)

    @contextmanager
    def after_computation(self) -> Iterator[None]:
        """Put work on this stream, behind all that the current stream has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def done(self) -> Callable[[], None]:
        """Return a function that makes the then current stream wait for all work that is on this stream now."""
        return partial(_wait_event, self.stream.record_event(), self.device)

    def join(self) -> None:
        """Let the current stream wait for all work on this one."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def uses(self, tensors: Iterable[Tensor]) -> None:
        """Keep memory of tensors from other uses until this stream is done with it, also if the run is dropped.

        Work may be on its way when nobody is left to wait for it.
        """
        for tensor in tensors:
            tensor.record_stream(self.stream)


def _wait_event(event: torch.cuda.Event, device: torch.device) -> None:
    torch.cuda.current_stream(device).wait_event(event)


Registration = Literal["off", "local", "symmetric"]
OLDEST = {"local": (2, 19), "symmetric": (2, 27)}
"""The first NCCL with each kind of registration."""


def why_not(kind: Registration, device: torch.device) -> str | None:
    """Return why buffers on a device cannot be registered in this process, or None. No message is sent."""
    if kind == "off":
        return None
    if device.type != "cuda":
        return f"it needs GPUs, and the buffers are on {device}"
    if not dist.is_initialized() or not uses_backend("nccl"):
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

    ``local``: each rank registers its own buffers, and messages inside a host need fewer SMs and no copies.
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
            raise ConfigurationError(f"data_parallel.advanced.nccl_ub={kind!r}: {reason}. Or use 'off'.")
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
