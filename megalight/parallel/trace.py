"""Named spans of a training step: where profilers, timers and reports look in. Off, a span costs a call and no more.

What runs a step says what it is doing::

    with span("forward", chunk=0, micro_batch=3):
        ...

and whoever wants to know listens, usually a callback, by :func:`listen`. Which spans there are is listed in
:data:`SPANS`; code of one's own may add others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

SPANS = {
    "forward": "one micro-batch through one chunk of layers; on the last stage its loss too",
    "backward": "the gradients of one micro-batch in one chunk",
    "input_gradient": "of those, the part that the previous stage waits for (zero-bubble schedules)",
    "weight_gradient": "the other part",
    "receive": "waiting for a pipeline neighbour, inside one of the above",
    "reduce_gradients": "one bucket of gradients over the data-parallel ranks, on a stream of its own",
    "finish_gradients": "what is left to reduce when all micro-batches are through",
    "clip": "the global gradient norm, and scaling by it",
    "optimizer": "the update of this rank's shards of the weights",
    "gather_parameters": "starting to bring the updated weights to all data-parallel ranks",
    "checkpoint": "writing a checkpoint",
}
"""The spans of Megalight's own steps, in about the order in which they come."""

P = ParamSpec("P")
R = TypeVar("R")


class Listener(Protocol):
    """Whoever is told of spans. Within one thread, spans end in the reverse order of their beginnings.

    Under CUDA, parts of the backward pass run in threads of autograd.
    """

    def begin(self, name: str, where: dict[str, int]) -> None:
        """A span begins; ``where`` tells it from others of its name."""

    def end(self, name: str) -> None:
        """It ends, perhaps by an error."""


class Span:
    """A span that somebody listens to."""

    __slots__ = ("listeners", "name", "where")

    def __init__(self, name: str, where: dict[str, int], listeners: tuple[Listener, ...]) -> None:
        self.name = name
        self.where = where
        self.listeners = listeners

    def __enter__(self) -> None:
        for listener in self.listeners:
            listener.begin(self.name, self.where)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for listener in reversed(self.listeners):
            listener.end(self.name)


class Silence:
    """A span that nobody listens to: the same object always."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


SILENCE = Silence()
_listeners: list[Listener] = []


def span(name: str, **where: int) -> Span | Silence:
    """A context manager: listeners are told when it is entered and left, also where it is left by an error."""
    return Span(name, where, tuple(_listeners)) if _listeners else SILENCE


def spanned(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose calls are spans. Whether anybody listens is asked at each call, not when it is decorated."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return function(*args, **kwargs)

        return wrapped

    return decorate


def listen(listener: Listener) -> Callable[[], None]:
    """Tell ``listener`` of every span from now on; returns what stops it (and may be called twice)."""
    _listeners.append(listener)

    def stop() -> None:
        _listeners[:] = [other for other in _listeners if other is not listener]

    return stop


@contextmanager
def silence() -> Iterator[None]:
    """Nobody is told of spans inside: what runs there is recorded, and its time is none that a step takes."""
    listeners, _listeners[:] = list(_listeners), []
    try:
        yield
    finally:
        _listeners[:] = listeners
