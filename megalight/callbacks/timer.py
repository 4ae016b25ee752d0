"""Timers by name and level: host clocks on CPU, events on CUDA that are read once the device has got there."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch

from megalight.errors import ConfigurationError, MegalightError

LEVELS: dict[str, int] = {
    "step": 0,
    "data": 0,
    "optimizer": 0,
    "checkpoint": 0,
    "forward": 1,
    "backward": 1,
    "input_gradient": 1,
    "weight_gradient": 1,
    "finish_gradients": 1,
    "receive": 2,
    "reduce_gradients": 2,
    "clip": 2,
    "gather_parameters": 2,
}
"""How fine a span is; spans of one's own are of level 1."""
OWN = 1


class Clock:
    """Moments on a device. Taking one never waits for it; events are used again once they were read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._spare: list[Any] = []

    def now(self) -> Any:
        """This moment of the current stream; None while a graph is captured, which has no time of its own."""
        if not self.cuda:
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, moment: Any) -> bool:
        """Whether the device has got there."""
        return not self.cuda or bool(moment.query())

    def seconds(self, first: Any, last: Any) -> float:
        """From one moment to another; waits until the device is there. Both are given up."""
        if not self.cuda:
            return float(last - first)
        last.synchronize()
        seconds = float(first.elapsed_time(last)) / 1000
        self._spare += (first, last)
        return seconds


class Measured(NamedTuple):
    """Time under one name: moments not read yet, seconds that were, and how often it came up."""

    segments: list[tuple[Any, Any]]
    seconds: float
    times: int


@dataclass(eq=False)
class Timer:
    """The time spent under one name.

    Attributes:
        active: seconds ever measured and read; never reset.
    """

    name: str
    clock: Clock
    active: float = 0.0
    _elapsed: float = 0.0
    _count: int = 0
    _segments: deque[tuple[Any, Any]] = field(default_factory=deque)
    _threads: threading.local = field(default_factory=threading.local)

    def start(self) -> None:
        """Begin to measure.

        Raises:
            MegalightError: it is running in this thread.
        """
        if getattr(self._threads, "running", False):
            raise MegalightError(f"the timer {self.name!r} runs already; stop it before it is started again.")
        self._threads.running, self._threads.begun = True, self.clock.now()

    def stop(self) -> None:
        """End what :meth:`start` began.

        Raises:
            MegalightError: it is not running in this thread.
        """
        if not getattr(self._threads, "running", False):
            raise MegalightError(f"the timer {self.name!r} does not run; start it before it is stopped.")
        self._threads.running = False
        now = self.clock.now()
        if self._threads.begun is not None and now is not None:
            self._segments.append((self._threads.begun, now))
            self._count += 1

    def settle(self) -> None:
        """Read what the device has left behind, without waiting; its events are free again."""
        while self._segments and self.clock.passed(self._segments[0][1]):
            seconds = self.clock.seconds(*self._segments.popleft())
            self.active += seconds
            self._elapsed += seconds

    def take(self) -> Measured:
        """What was measured since the last reset, for :meth:`read`; the timer begins anew."""
        taken = Measured(list(self._segments), self._elapsed, self._count)
        self._segments.clear()
        self._elapsed, self._count = 0.0, 0
        return taken

    def read(self, taken: Measured) -> float:
        """Seconds in what :meth:`take` returned; waits until the device has got there."""
        seconds = sum(self.clock.seconds(first, last) for first, last in taken.segments)
        self.active += seconds
        return seconds + taken.seconds

    def elapsed(self, reset: bool = True) -> float:
        """Seconds since the last reset; waits until the device has got there."""
        count, seconds = self._count, self.read(self.take())
        if not reset:
            self._elapsed, self._count = seconds, count
        return seconds

    def set_elapsed(self, seconds: float) -> None:
        """Put in what was measured elsewhere, in place of what was measured here since the last reset."""
        self._segments.clear()
        self.active += seconds
        self._elapsed, self._count = seconds, 1

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


class NoTimer(Timer):
    """A timer whose level is switched off: it measures nothing, and never touches the device."""

    def start(self) -> None:
        """Nothing."""

    stop = start

    def set_elapsed(self, seconds: float) -> None:
        """Nothing."""


OFF = NoTimer("off", Clock(torch.device("cpu")))


@dataclass(frozen=True)
class Times:
    """What timers measured in a window of steps, still on its way.

    Attributes:
        step: optimizer steps done at the window's end.
        steps: optimizer steps in it.
        first: whether it is the first step of training, which is like no other.
    """

    step: int
    steps: int
    first: bool
    taken: Mapping[str, tuple[Timer, Measured]]

    def seconds(self) -> dict[str, float]:
        """Seconds per step of each name that came up; waits until the device has left the window."""
        return {
            name: timer.read(taken) / max(self.steps, 1) for name, (timer, taken) in self.taken.items() if taken.times
        }


class TimerTable:
    """Timers by name; a listener of spans (see :mod:`megalight.parallel.trace`).

    Args:
        device: whose time is measured.
        level: the finest that is; 0 to 2.
        levels: of names; those that are not in it are of level 1.

    Raises:
        ConfigurationError: a level that does not exist.
    """

    def __init__(self, device: torch.device, level: int, levels: Mapping[str, int] = LEVELS) -> None:
        self.clock = Clock(device)
        self.level = check_level(level)
        self.levels = dict(levels)
        self._timers: dict[str, Timer] = {}

    def timer(self, name: str, level: int | None = None) -> Timer:
        """The timer of a name: one that does nothing where its level is switched off.

        Args:
            level: of the name, where it is new; None: 1.
        """
        if self.levels.setdefault(name, OWN if level is None else check_level(level)) > self.level:
            return OFF
        if name not in self._timers:
            self._timers[name] = Timer(name, self.clock)
        return self._timers[name]

    def begin(self, name: str, where: dict[str, int]) -> None:
        """A span begins."""
        self.timer(name).start()

    def end(self, name: str) -> None:
        """It ends."""
        self.timer(name).stop()

    def settle(self) -> None:
        """Read what the device has left behind: a long window then holds the events of a few steps only."""
        for timer in self._timers.values():
            timer.settle()

    def close(self, step: int, steps: int, first: bool = False) -> Times:
        """What was measured since the last time; every timer begins anew. Nothing is waited for."""
        return Times(step, steps, first, {name: (timer, timer.take()) for name, timer in self._timers.items()})


def check_level(level: int) -> int:
    """A timing level.

    Raises:
        ConfigurationError: none there is.
    """
    if level not in (0, 1, 2):
        raise ConfigurationError(f"the timing level is {level}; it must be 0 (coarse), 1 or 2 (fine).")
    return level
