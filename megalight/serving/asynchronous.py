"""What ``asyncio`` lacks in Python 3.11 and 3.12: a queue that shuts down. And the event loop of code that has none."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections import deque
from typing import TypeVar

T = TypeVar("T")

if sys.version_info >= (3, 13):
    Queue = asyncio.Queue
    QueueShutDown = asyncio.QueueShutDown
else:

    class QueueShutDown(Exception):
        """The queue is shut down, and has nothing left."""

    class Queue(asyncio.Queue[T]):
        """An ``asyncio.Queue`` with the ``shutdown`` of Python 3.13."""

        def __init__(self, maxsize: int = 0) -> None:
            super().__init__(maxsize)
            self._is_shutdown = False
            self._waiting: deque[asyncio.Future[None]] = deque()

        def shutdown(self, immediate: bool = False) -> None:
            """Refuse further items at once. What is in the queue can still be taken.

            Args:
                immediate: drop what is in the queue, which then counts as done, so that ``join`` returns.
            """
            self._is_shutdown = True
            while immediate and not self.empty():
                super().get_nowait()
                self.task_done()
            self._wake()

        async def put(self, item: T) -> None:
            """Put an item, when there is room.

            Raises:
                QueueShutDown: the queue is shut down, also while this waits.
            """
            while self.full() and not self._is_shutdown:
                await self._change()
            self.put_nowait(item)

        def put_nowait(self, item: T) -> None:
            """Put an item.

            Raises:
                QueueShutDown: the queue is shut down.
                asyncio.QueueFull: there is no room.
            """
            if self._is_shutdown:
                raise QueueShutDown
            super().put_nowait(item)
            if self._waiting:
                self._wake()

        async def get(self) -> T:
            """Take the next item, when there is one.

            Raises:
                QueueShutDown: the queue is shut down and empty, also while this waits.
            """
            while self.empty() and not self._is_shutdown:
                await self._change()
            return self.get_nowait()

        def get_nowait(self) -> T:
            """Take the next item.

            Raises:
                QueueShutDown: the queue is shut down and empty.
                asyncio.QueueEmpty: there is none.
            """
            if self.empty() and self._is_shutdown:
                raise QueueShutDown
            item = super().get_nowait()
            if self._waiting:
                self._wake()
            return item

        async def _change(self) -> None:
            """Wait until an item comes or goes, or the queue is shut down."""
            change = asyncio.get_running_loop().create_future()
            self._waiting.append(change)
            try:
                await change
            except asyncio.CancelledError:
                if change.done() and not change.cancelled():
                    # It was woken for an item that it leaves to others.
                    self._wake()
                raise

        def _wake(self) -> None:
            while self._waiting:
                change = self._waiting.popleft()
                if not change.done():
                    change.set_result(None)


def get_asyncio_loop(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
    """Return ``loop``, or the running event loop, or this thread's, which is made if there is none.

    Two calls in a row return the same.
    """
    if loop is not None:
        return loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    with warnings.catch_warnings():
        # Python 3.12 and 3.13 warn where 3.14 raises: this thread has no event loop.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            found = asyncio.get_event_loop()
        except RuntimeError:
            found = None
    if found is None or found.is_closed():
        found = asyncio.new_event_loop()
        asyncio.set_event_loop(found)
    return found
