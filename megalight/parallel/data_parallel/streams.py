"""A CUDA stream beside the one that computes: messages and copies run there, and only streams wait, never the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor


def side_stream(device: torch.device, needed: bool = True, urgent: bool = False) -> SideStream | None:
    """Return a stream beside the computation on ``device``; None on a CPU, where nothing runs beside it.

    Args:
        urgent: its kernels get multiprocessors before those of other streams.
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
