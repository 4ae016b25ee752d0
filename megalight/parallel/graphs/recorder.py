"""Recording work on a device and replaying it: the seam behind which CUDA graphs lie."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from megalight.parallel.trace import silence

T = TypeVar("T")


class Recording(Protocol[T]):
    """Recorded work.

    Attributes:
        result: what the function returned. Its tensors are static: every replay writes into them.
    """

    result: T

    def replay(self) -> None:
        """Do the work again, on the same memory. Nothing of the function's Python runs."""

    def drop(self) -> None:
        """Give the memory back."""


class Recorder(Protocol):
    """Makes recordings."""

    def enter(self) -> None:
        """All work of this thread is for the recorder's stream from now on: graphs cannot record the default one."""

    def leave(self) -> None:
        """It is for the stream of before again."""

    def record(
        self,
        function: Callable[[], T],
        generators: Sequence[torch.Generator] = (),
        pool: Hashable = None,
        settle: bool = True,
    ) -> Recording[T]:
        """Record what ``function`` would do; nothing is done yet.

        Args:
            settle: wait for the device first, and free memory that nobody uses. Not while a message of another rank is
                awaited, which may in turn wait for one of ours.
            generators: that it draws from, besides the device's default one. Replays move them on.
            pool: recordings of one pool share memory: a replay may overwrite what another one has left behind, but for
                tensors that are still referred to. They must not run at the same time.

        Raises:
            Exception: whatever it raised. The device, and generators, are then as before.
        """
        ...


class GraphRecording(Generic[T]):
    """One CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: T) -> None:
        self.graph = graph
        self.result = result

    def replay(self) -> None:
        """Launch it on the current stream."""
        self.graph.replay()

    def drop(self) -> None:
        """Its results first: their memory belongs to the graph's pool."""
        del self.result
        self.graph.reset()


class CUDARecorder:
    """Records CUDA graphs on a stream of its own.

    Autograd runs the accumulation of a gradient on the stream that was current when the parameter was first prepared
    for it. So :meth:`enter` must come before that, and all training runs on this stream, recorded or not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self._before: torch.cuda.Stream | None = None
        self._pools: dict[Hashable, Any] = {}

    def enter(self) -> None:
        """Make the stream current."""
        self.stream = self.stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._before = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(self._before)
        torch.cuda.set_stream(self.stream)

    def leave(self) -> None:
        """Make the stream of before current."""
        if self._before is not None and self.stream is not None:
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
        """One CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        if pool not in self._pools:
            gc.collect()  # it takes long, and is worth it once for many recordings
            self._pools[pool] = torch.cuda.graph_pool_handle()
        handle = self._pools[pool]
        with no_collection(), silence():
            if settle:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()  # what earlier passes left behind is of no use to the graph's own pool
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")  # others' threads may go on
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
        return GraphRecording(graph, result)

    def _abandon(self, graph: torch.cuda.CUDAGraph, handle: Any, generators: Sequence[torch.Generator]) -> None:
        with suppress(RuntimeError):  # it says what the function's own error has said
            graph.capture_end()
        self._mend(handle, generators)

    def _mend(self, handle: Any, generators: Sequence[torch.Generator]) -> None:
        """Take back what a recording that broke off leaves behind: torch does so only for those that end well."""
        with suppress(RuntimeError):  # it has ended
            torch._C._cuda_endAllocateToPool(self.device.index or 0, handle)
        default = torch.cuda.default_generators[self.device.index or 0]
        for generator in (default, *generators):
            generator.graphsafe_set_state(generator.clone_state())  # a copy is not being recorded
        self._pools.clear()


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected inside: what is freed in the midst of a recording may touch the device."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
