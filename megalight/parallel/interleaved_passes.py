"""Two passes that take turns: while the messages of one travel, the other computes.

Code that has started a message calls :func:`pause` before it waits for it. This ends the turn of the pass that runs,
and the other one goes on from its own last pause::

    work = dist.all_to_all_single(..., async_op=interleaving())
    pause()
    work.wait()

So the pieces of a pass are whatever lies between two of its messages: a model need not say where they begin, and
recompute inside a backward takes part. Each pass has a thread, because autograd cannot stop halfway otherwise. Only one
of the two runs at a time, and turns change in :func:`pause` alone. So the order of all work, and of all collectives, is
the same in every run, and on all ranks that run the same layers. On CUDA both passes use the same stream.

The first pass must not start a backward of its own (``torch.autograd.grad`` in a forward pass): on CUDA autograd runs
all of them in one thread, which then belongs to the second pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch

FIRST, SECOND = 0, 1


class PassAborted(BaseException):
    """Ends a pass, in its pause, because the other one has failed."""


class PassInterleaver:
    """Runs pairs of passes.

    Args:
        device: the device of both.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        # Made by the first pair: most runs have none, and what holds a thread cannot be pickled.
        return ThreadPoolExecutor(1, "megalight-second-pass")

    def play(self, first: Callable[[], None], second: Callable[[], None], fill: Callable[[], None]) -> None:
        """Run both passes to their ends. The second one begins.

        Args:
            first: runs in the thread of the caller.
            second: runs in a thread of its own, on the caller's stream.
            fill: further work of the second pass, done in each of its pauses before the turn ends.

        Raises:
            Exception: the error of a pass. The other pass is then abandoned.
        """
        pair = _PassPair(fill)
        _pairs.append(pair)
        # a thread begins with the first device and its default stream
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        future = self._thread.submit(_run_second, pair, second, stream)
        try:
            try:
                pair.wait(FIRST)
                first()
            except BaseException:
                pair.broken = True
                raise
            finally:
                # First release the second pass, then join it: it may be waiting for a turn
                # that would never come.
                pair.end(FIRST)
                wait([future])
        except PassAborted:
            pass  # the second pass has failed, with the error that comes now
        finally:
            _pairs.pop()
        # Raises the error of the second pass, if it had one.
        future.result()


def pause() -> None:
    """End the turn of the pass that runs; return when the other one pauses or ends. Nothing if no passes take turns."""
    if _pairs:
        _pairs[-1].pause()


def interleaving() -> bool:
    """Return whether passes take turns now, so that messages should not block."""
    return bool(_pairs)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep the turn inside the context. For code that sets a state which the other pass uses as well."""
    pairs = _pairs[-1:]
    for pair in pairs:
        pair.held += 1
    try:
        yield
    finally:
        for pair in pairs:
            pair.held -= 1


class _PassPair:
    """Two passes, of which one has the turn."""

    def __init__(self, fill: Callable[[], None]) -> None:
        self.fill = fill
        self.turn = SECOND
        self.held = 0
        self.broken = False
        self._ended = [False, False]
        # Two semaphores, not a lock: one pass hands its turn over to the other, in another thread.
        self._batons = [threading.Semaphore(0), threading.Semaphore(0)]

    def pause(self) -> None:
        if self.held:
            return
        me, other = self.turn, 1 - self.turn
        if me == SECOND:
            self.fill()
        if self.broken:  # the first pass was interrupted while it waited
            raise PassAborted
        # A pass that has ended never pauses again, and would not give the turn back.
        if not self._ended[other]:
            self._give(other)
            self.wait(me)

    def wait(self, who: int) -> None:
        self._batons[who].acquire()
        if self.broken:
            raise PassAborted

    def end(self, who: int) -> None:
        self._ended[who] = True
        if self.turn == who:
            self._give(1 - who)

    def _give(self, who: int) -> None:
        self.turn = who
        self._batons[who].release()


_pairs: list[_PassPair] = []
"""The pair that runs now. Not thread-local: autograd on CUDA runs backwards in a thread of its own."""


def _run_second(pair: _PassPair, second: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
    try:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            second()
    except BaseException:
        pair.broken = True
        raise
    finally:
        pair.end(SECOND)
