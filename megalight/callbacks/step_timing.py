"""Time the parts of training steps: device clocks, timers by name, and callbacks that listen to spans.

- :class:`Clock`, :class:`Timer`, :class:`TimerTable`: host clocks on CPU, device events on CUDA that are read later.
- :class:`StepSpans`: a callback that adds spans from Lightning's hooks to those of :mod:`megalight.parallel.trace`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel.trace import Listener, listen
from megalight.strategies.mesh_strategy import MeshStrategy

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
"""The level of each span: 0 is coarse, 2 is fine."""

OWN = 1
"""The level of spans that users add."""


class Clock:
    """Takes time stamps on a device without waiting for it. CUDA events are reused after they were read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._spare: list[Any] = []

    def now(self) -> Any:
        """Return a time stamp of the current stream; None while a CUDA graph is captured, because nothing runs then."""
        if not self.cuda:
            return time.perf_counter()
        # A recorded event has no time: it would be replayed with the graph, and read as that of the recording.
        if torch.cuda.is_current_stream_capturing():
            return None
        # Creating an event is slow, and a step needs dozens: events that were read are used again.
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, moment: Any) -> bool:
        """Return whether the device has reached the time stamp."""
        return not self.cuda or bool(moment.query())

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two time stamps, and wait for the device if needed. Use each stamp only once."""
        if not self.cuda:
            return float(last - first)
        # Only here the host waits; `settle` reads what is done already, so the wait is for
        # the latest ones at most.
        last.synchronize()
        seconds = float(first.elapsed_time(last)) / 1000
        self._spare += (first, last)
        return seconds


class TimerRecord(NamedTuple):
    """The time of one name: time stamps that are not read yet, seconds that are, and the number of measurements."""

    segments: list[tuple[Any, Any]]
    seconds: float
    times: int


@dataclass(eq=False)
class Timer:
    """Measures the time of one name.

    Attributes:
        name: the name.
        clock: takes the time stamps.
        active: all seconds that were measured and read; never reset.
    """

    name: str
    clock: Clock
    active: float = 0.0
    _elapsed: float = 0.0
    _count: int = 0
    _segments: deque[tuple[Any, Any]] = field(default_factory=deque)
    _threads: threading.local = field(default_factory=threading.local)

    def start(self) -> None:
        """Start measuring.

        Raises:
            MegalightError: the timer already runs in this thread.
        """
        # Per thread: passes of two micro-batches take turns in threads of their own, under the same names.
        if getattr(self._threads, "running", False):
            raise MegalightError(f"the timer {self.name!r} already runs; stop it before you start it again.")
        self._threads.running, self._threads.begun = True, self.clock.now()

    def stop(self) -> None:
        """Stop measuring.

        Raises:
            MegalightError: the timer does not run in this thread.
        """
        if not getattr(self._threads, "running", False):
            raise MegalightError(f"the timer {self.name!r} does not run; start it before you stop it.")
        self._threads.running = False
        now = self.clock.now()
        # A span that began or ended inside a capture has one stamp only, and is not measured.
        if self._threads.begun is not None and now is not None:
            self._segments.append((self._threads.begun, now))
            self._count += 1

    def settle(self) -> None:
        """Read the measurements that the device has finished, without waiting. Their events can be reused."""
        # In order: events of one stream are done in the order in which they were recorded.
        while self._segments and self.clock.passed(self._segments[0][1]):
            seconds = self.clock.seconds(*self._segments.popleft())
            self.active += seconds
            self._elapsed += seconds

    def take(self) -> TimerRecord:
        """Return the measurements since the last reset, for :meth:`read`, and reset the timer."""
        # Copied, because the timer goes on while these wait to be read.
        taken = TimerRecord(list(self._segments), self._elapsed, self._count)
        self._segments.clear()
        self._elapsed, self._count = 0.0, 0
        return taken

    def read(self, taken: TimerRecord) -> float:
        """Return the seconds of measurements from :meth:`take`, and wait for the device if needed."""
        seconds = sum(self.clock.seconds(first, last) for first, last in taken.segments)
        self.active += seconds
        return seconds + taken.seconds

    def elapsed(self, reset: bool = True) -> float:
        """Return the seconds since the last reset, and wait for the device if needed."""
        # Counted before `take` resets it.
        count, seconds = self._count, self.read(self.take())
        if not reset:
            self._elapsed, self._count = seconds, count
        return seconds

    def set_elapsed(self, seconds: float) -> None:
        """Replace the measurements since the last reset by seconds that were measured elsewhere."""
        self._segments.clear()
        self.active += seconds
        self._elapsed, self._count = seconds, 1

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


class NoTimer(Timer):
    """A timer whose level is off. It measures nothing and never uses the device."""

    def start(self) -> None:
        """Do nothing."""

    stop = start

    def set_elapsed(self, seconds: float) -> None:
        """Do nothing."""


OFF = NoTimer("off", Clock(torch.device("cpu")))


@dataclass(frozen=True)
class Times:
    """The measurements of a window of steps, which the device may not have finished.

    Attributes:
        step: number of optimizer steps done at the end of the window.
        steps: number of optimizer steps in the window.
        first: whether this is the first step of training, which takes longer than others.
        taken: name -> timer and its measurements.
    """

    step: int
    steps: int
    first: bool
    taken: Mapping[str, tuple[Timer, TimerRecord]]

    def seconds(self) -> dict[str, float]:
        """Return the seconds per step of each name that was measured, and wait for the device if needed."""
        return {
            name: timer.read(taken) / max(self.steps, 1) for name, (timer, taken) in self.taken.items() if taken.times
        }


class TimerTable:
    """A listener that times spans (see :mod:`megalight.parallel.trace`), with one timer per name.

    Args:
        device: the device whose time is measured.
        level: the finest level that is measured: 0, 1 or 2.
        levels: level of each name; other names have level 1.

    Raises:
        ConfigurationError: the level does not exist.
    """

    def __init__(self, device: torch.device, level: int, levels: Mapping[str, int] = LEVELS) -> None:
        self.clock = Clock(device)
        self.level = check_level(level)
        self.levels = dict(levels)
        self._timers: dict[str, Timer] = {}

    def timer(self, name: str, level: int | None = None) -> Timer:
        """Return the timer of a name. It does nothing if its level is off.

        Args:
            name: the name.
            level: the level of a new name. None: 1.
        """
        # The level of the first call stays: later calls by name alone must find the same timer.
        if self.levels.setdefault(name, OWN if level is None else check_level(level)) > self.level:
            return OFF
        if name not in self._timers:
            self._timers[name] = Timer(name, self.clock)
        return self._timers[name]

    def begin(self, name: str, where: dict[str, int]) -> None:
        """Start the timer of a span."""
        self.timer(name).start()

    def end(self, name: str) -> None:
        """Stop the timer of a span."""
        self.timer(name).stop()

    def settle(self) -> None:
        """Read finished measurements, so that a long window holds only the events of a few steps."""
        for timer in self._timers.values():
            timer.settle()

    def close(self, step: int, steps: int, first: bool = False) -> Times:
        """Return the measurements since the last call and reset all timers, without waiting for the device."""
        return Times(step, steps, first, {name: (timer, timer.take()) for name, timer in self._timers.items()})


def check_level(level: int) -> int:
    """Return the level if it exists.

    Raises:
        ConfigurationError: it does not.
    """
    if level not in (0, 1, 2):
        raise ConfigurationError(f"the timing level is {level}; it must be 0 (coarse), 1 or 2 (fine).")
    return level


def label(name: str, where: dict[str, int]) -> str:
    """Return the label of a span: ``forward chunk=0 micro_batch=3``."""
    return name + "".join(f" {key}={value}" for key, value in where.items())


class StepSpans(pl.Callback, ABC):
    """Listens to spans while ``fit`` trains, and adds spans from Lightning's hooks.

    The added spans are ``step`` (one batch), ``data`` (waiting for the next batch) and ``optimizer`` (clipping and the
    update). Our own strategies report ``forward`` and ``backward``; for other strategies they are added too. Open spans
    end when an error occurs.

    Attributes:
        during_validation: whether to listen during validation.
    """

    during_validation = True

    @abstractmethod
    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Listener | None:
        """Create the listener when training starts. None: this rank does not listen."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._stops: list[Callable[[], None]] = []
        self._open: list[str] = []
        self._foreign = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to listen."""
        # A second fit may begin without the end of the first.
        self._finish()
        self._listener = self.listener(trainer, pl_module)
        # With our strategies, spans of passes come from the passes themselves.
        self._foreign = not isinstance(trainer.strategy, MeshStrategy)
        self._listen(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End ``data`` and begin ``step``."""
        self._end_all()  # `data`, or a step that the module skipped
        self._begin("step")
        if self._foreign:
            self._begin("forward")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        """End ``forward`` and begin ``backward``, for strategies that do not report them."""
        if self._foreign:
            self._end("forward")
            self._begin("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End ``backward``."""
        self._end("backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Begin ``optimizer``. A hook on the optimizer ends it (:meth:`_listen`)."""
        self._begin("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End ``step`` and begin ``data``."""
        self._end_all()
        self._begin("data")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """End ``data``: saving is not waiting for data."""
        self._end("data")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End all spans; stop listening unless ``during_validation``."""
        self._end_all()
        if not self.during_validation:
            self._stop()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen again."""
        if not self.during_validation and self._listener is not None:
            self._listen(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop listening."""
        self._finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End all open spans and stop listening."""
        self._finish()

    def _listen(self, trainer: pl.Trainer) -> None:
        if self._listener is not None:
            self._stops = [listen(self._listener)]
            for optimizer in trainer.optimizers:
                # Lightning has no hook after the update; without this, the end of the batch would be it.
                self._stops.append(optimizer.register_step_post_hook(lambda *given: self._end("optimizer")).remove)

    def _begin(self, name: str) -> None:
        if self._listener is not None:
            self._open.append(name)
            self._listener.begin(name, {})

    def _end(self, name: str) -> None:
        """End a span if it is open, together with the spans inside it."""
        # Spans nest: what began inside must end first.
        while name in self._open:
            self._end_last()

    def _end_all(self) -> None:
        while self._open:
            self._end_last()

    def _end_last(self) -> None:
        assert self._listener is not None
        self._listener.end(self._open.pop())

    def _stop(self) -> None:
        for stop in self._stops:
            stop()
        self._stops = []

    def _finish(self) -> None:
        # In this order: the ends of open spans must still reach the listener.
        self._end_all()
        self._stop()
        self._listener = None
