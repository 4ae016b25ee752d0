"""Recording work on a device and replaying it: the interface that hides CUDA graphs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch

from megalight.parallel.trace import silence

T = TypeVar("T")

FREEZE = "CUDA_GRAPH_CAPTURE_FREEZE_GC"
"""Environment variable. ``0``: garbage is collected before each capture, as ``torch.cuda.graph`` does; it frees memory,
and takes longer than the capture where a process has many objects. Otherwise once per pool, and not while capturing."""


class Recording(Protocol[T]):
    """Recorded work.

    Attributes:
        result: what the function returned. Its tensors are static: every replay writes into them.
    """

    result: T

    def replay(self) -> None:
        """Run the work again, on the same memory. No Python code of the function runs."""

    def drop(self) -> None:
        """Free the memory."""


class Recorder(Protocol):
    """Makes recordings."""

    def enter(self) -> None:
        """Make the recorder's stream current for this thread: CUDA graphs cannot capture the default stream."""

    def leave(self) -> None:
        """Make the earlier stream current again."""

    def record(
        self,
        function: Callable[[], T],
        generators: Sequence[torch.Generator] = (),
        pool: Hashable = None,
        settle: bool = True,
    ) -> Recording[T]:
        """Record the work of ``function`` without running it on the device.

        Args:
            settle: first wait for the device, and free unused memory. Do not set it while a message of another rank is
                awaited: that rank may itself wait for a message of this one.
            generators: random generators that the function uses besides the device's default one. Replays advance them.
            pool: recordings of one pool share memory. A replay may overwrite results of another recording, except
                tensors that are still referenced. Recordings of one pool must not run at the same time.

        Raises:
            Exception: any error of ``function``. The device and the generators are then as before.
        """
        ...


class GraphRecording(Generic[T]):
    """One CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: T) -> None:
        self.graph = graph
        self.result = result
        self.dropped = False

    def replay(self) -> None:
        """Launch it on the current stream."""
        self.graph.replay()

    def drop(self) -> None:
        """Free the results first, because their memory belongs to the graph's pool, then the graph."""
        del self.result
        self.graph.reset()
        self.dropped = True


class CUDARecorder:
    """Records CUDA graphs on a stream of its own.

    Autograd accumulates a gradient on the stream that was current when the parameter's accumulation was first set up.
    So call :meth:`enter` before that, and run all training on this stream, recorded or not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self._before: torch.cuda.Stream | None = None
        # The handle of each pool, and its recordings.
        self._pools: dict[Hashable, tuple[Any, WeakSet[GraphRecording[Any]]]] = {}

    def enter(self) -> None:
        """Make the recorder's stream current."""
        self.stream = self.stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._before = torch.cuda.current_stream(self.device)
        # Work that the default stream still holds (initial values, copies of batches) must come before what runs here.
        self.stream.wait_stream(self._before)
        torch.cuda.set_stream(self.stream)

    def leave(self) -> None:
        """Make the earlier stream current again."""
        if self._before is not None and self.stream is not None:
            # The next step on the old stream reads what was written here.
            self._before.wait_stream(self.stream)
            torch.cuda.set_stream(self._before)
            self._before = None

    def record(
        self,
        function: Callable[[], T],
        generators: Sequence[torch.Generator] = (),
        pool: Hashable = None,
        settle: bool = True,
    ) -> GraphRecording[T]:
        """Capture one CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            # Before the capture: each replay then advances the generator, and draws other numbers.
            graph.register_generator_state(generator)
        thawed = os.environ.get(FREEZE) == "0"
        if thawed or (settle and pool not in self._pools):
            gc.collect()  # slow, so only once per pool
        # A pool ends with its last recording: the allocator takes its handle no more.
        if not any(not recording.dropped for recording in self._pools.get(pool, (None, ()))[1]):
            self._pools[pool] = torch.cuda.graph_pool_handle(), WeakSet()
        handle, recordings = self._pools[pool]
        with no_collection(), silence():
            if settle:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()  # cached blocks of eager steps are of no use to the graph's own pool
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")  # other threads may use CUDA meanwhile
            try:
                result = function()
            except BaseException:
                self._abandon(graph, handle, generators)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._mend(handle, generators)
                raise
        recordings.add(recording := GraphRecording(graph, result))
        return recording

    def _abandon(self, graph: torch.cuda.CUDAGraph, handle: Any, generators: Sequence[torch.Generator]) -> None:
        with suppress(RuntimeError):  # it would only repeat the function's own error
            graph.capture_end()
        self._mend(handle, generators)

    def _mend(self, handle: Any, generators: Sequence[torch.Generator]) -> None:
        """Clean up after a failed capture; torch does so only after captures that end well."""
        with suppress(RuntimeError):  # the allocation has ended already
            torch._C._cuda_endAllocateToPool(self.device.index or 0, handle)
        default = torch.cuda.default_generators[self.device.index or 0]
        for generator in (default, *generators):
            generator.graphsafe_set_state(generator.clone_state())  # a cloned state does not belong to the capture
        # A pool whose capture failed may hold blocks that belong to no graph: later recordings begin with new pools.
        self._pools.clear()


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection inside: an object freed during a capture may call the device."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
