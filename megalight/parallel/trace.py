"""Named spans of a training step, for profilers, timers and reports. Without a listener, a span is one function call.

The code of a step marks its parts::

    with span("forward", chunk=0, micro_batch=3):
        ...

Listeners, usually callbacks, register with :func:`listen`. :data:`SPANS` lists the spans; your own code may add others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

import torch

SPANS = {
    "forward": "one micro-batch through one chunk of layers; on the last stage its loss too",
    "backward": "the gradients of one micro-batch in one chunk",
    "input_gradient": "the part of the backward that the previous stage waits for (zero-bubble schedules)",
    "weight_gradient": "the other part of the backward",
    "receive": "waiting for a pipeline neighbor, inside one of the above",
    "reduce_gradients": "the reduction of one bucket of gradients, on its own stream",
    "finish_gradients": "the reductions that are left after all micro-batches",
    "clip": "the global gradient norm, and scaling by it",
    "optimizer": "the update of this rank's shards of the weights",
    "gather_parameters": "the start of the all-gather of the updated weights",
    "checkpoint": "writing a checkpoint",
}
"""The spans of Megalight's own steps, roughly in order."""

P = ParamSpec("P")
R = TypeVar("R")


class Listener(Protocol):
    """Receives the begin and end of spans. Within a thread, spans are nested.

    On CUDA, autograd runs parts of the backward in its own threads.
    """

    def begin(self, name: str, where: dict[str, int]) -> None:
        """Called when a span begins. ``where`` distinguishes spans of the same name."""

    def end(self, name: str) -> None:
        """Called when a span ends, also after an error."""


class Span:
    """A span with listeners."""

    __slots__ = ("listeners", "name", "where")

    def __init__(self, name: str, where: dict[str, int], listeners: tuple[Listener, ...]) -> None:
        self.name = name
        self.where = where
        self.listeners = listeners

    def __enter__(self) -> None:
        for listener in self.listeners:
            listener.begin(self.name, self.where)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # In reverse, so that listeners nest: what began last ends first.
        for listener in reversed(self.listeners):
            listener.end(self.name)


class NullSpan:
    """A span without listeners. There is only one such object."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


SILENCE = NullSpan()
_listeners: list[Listener] = []


def span(name: str, **where: int) -> Span | NullSpan:
    """Return a context manager that tells listeners when it is entered and left, also after an error."""
    # A tuple: listeners that come or go inside the span do not change who hears its end.
    return Span(name, where, tuple(_listeners)) if _listeners else SILENCE


def spanned(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that makes every call of a function a span. Listeners are looked up at each call."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return function(*args, **kwargs)

        return wrapped

    return decorate


def listen(listener: Listener) -> Callable[[], None]:
    """Report every span to ``listener`` from now on. Returns a function that stops this."""
    _listeners.append(listener)

    def stop() -> None:
        # A new content of the same list: a listener may stop itself while listeners are being called.
        _listeners[:] = [other for other in _listeners if other is not listener]

    return stop


@contextmanager
def silence() -> Iterator[None]:
    """Context manager without listeners: a graph is recorded inside, which is not part of a step's time."""
    listeners, _listeners[:] = list(_listeners), []
    try:
        yield
    finally:
        _listeners[:] = listeners


def capturing() -> bool:
    """Whether a CUDA graph is capturing the current stream; the host must then not wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
