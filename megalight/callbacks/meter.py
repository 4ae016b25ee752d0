"""Measure windows of steps without making the host wait: tokens/s, TFLOP/s, share of the device's peak, memory."""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from megalight.attachments import restore
from megalight.parallel.peers.memory import peak_allocated
from megalight.types import TokenBatch


@dataclass(frozen=True)
class Window:
    """Measurements of a few consecutive steps.

    Attributes:
        step: number of optimizer steps done at the end of the window.
        steps: number of optimizer steps in the window.
        seconds: device time (wall time on CPU), without validation.
        tokens: tokens over all ranks; 0 if unknown.
        sequence_length: sequence length of the batches in tokens; 0 if unknown.
        values: the values requested at the end of the window.
        data_wait: share of the window in which the host waited for the next batch; None if that is not measured.
    """

    step: int
    steps: int
    seconds: float
    tokens: int
    sequence_length: int
    values: Mapping[str, float]
    data_wait: float | None = None


@dataclass
class _PendingWindow:
    step: int
    steps: int
    tokens: int
    sequence_length: int
    given: dict[str, Any]
    names: tuple[str, ...]
    values: Tensor
    segments: list[tuple[Any, Any]] = field(default_factory=list)
    waited: float = 0.0


class StepMeter:
    """Measures windows of steps.

    On CUDA, times come from device events, and values are copied to page-locked memory. :meth:`poll` returns a window
    when the device has finished it, about a step later.

    Args:
        device: the device of the steps.

    Attributes:
        last_step: number of optimizer steps done at the start of the open window.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[_PendingWindow] = deque()
        self._segments: list[tuple[Any, Any]] = []
        self._begun: Any = None
        self.last_step = 0
        self._tokens = 0
        self._sequence_length = 0
        self._wait: DataWait | None = None
        self._closed = False

    def start(self, step: int, trainer: pl.Trainer | None = None) -> None:
        """Begin the first window; ``step`` optimizer steps are done. With ``trainer``, also measure waits for data."""
        self._wait = None if trainer is None else DataWait(trainer)
        self.last_step = step
        self._closed = False
        self._tokens = 0
        self._segments = []
        self._begun = self._now()

    def stop(self) -> None:
        """Stop measuring waits for data."""
        if self._wait is not None:
            self._wait.stop()

    def pause(self) -> None:
        """Stop the clock, for validation."""
        if self._begun is not None:
            self._segments.append((self._begun, self._now()))
            self._begun = None

    def resume(self) -> None:
        """Restart the clock."""
        if self._begun is None:
            self._begun = self._now()

    def add(self, trainer: pl.Trainer, batch: Any) -> None:
        """Count the tokens of a training batch."""
        if isinstance(batch, TokenBatch):
            rows, self._sequence_length = batch.tokens.shape
            report = getattr(trainer.strategy, "report", None)
            # The global number of samples, if the strategy knows it. Else all ranks are taken
            # to have equal batches.
            samples = report.num_samples if report is not None else rows * trainer.world_size
            self._tokens += samples * self._sequence_length

    def due(self, trainer: pl.Trainer, every: int) -> bool:
        """Return whether the window has ``every`` steps, or the run ends before there was one."""
        step = trainer.global_step
        return step - self.last_step >= every or (not self._closed and self.last_step < step == last_step(trainer))

    def close(self, step: int, values: Mapping[str, Tensor | float]) -> None:
        """End the window at optimizer step ``step`` and begin the next one.

        ``values`` to read are 0-dim tensors, or numbers that the host knows.
        """
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        host = torch.empty(len(tensors), pin_memory=self.device.type == "cuda")
        if tensors:
            # One copy for all values, into page-locked memory: it runs beside the next step.
            scalars = [value.detach().to(self.device, torch.float32, non_blocking=True) for value in tensors.values()]
            host.copy_(torch.stack(scalars), non_blocking=True)
        now = self._now()
        # Closed while the clock stands still, a window has no open segment.
        segments = [*self._segments, *([(self._begun, now)] if self._begun is not None else [])]
        steps = step - self.last_step
        waited = 0.0 if self._wait is None else self._wait.take()
        counts = (step, steps, self._tokens, self._sequence_length)
        self._pending.append(_PendingWindow(*counts, dict(values), tuple(tensors), host, segments, waited))
        self.last_step, self._tokens, self._segments, self._begun = step, 0, [], now
        self._closed = True

    def poll(self, wait: bool = False) -> Window | None:
        """Return the oldest window if the device has finished it, else None. With ``wait``, wait for the device."""
        if not self._pending:
            return None
        # The last event is the latest, as events of a stream pass in order.
        last = self._pending[0].segments[-1][1]
        if self.device.type == "cuda":
            if wait:
                last.synchronize()
            elif not last.query():
                return None
        window = self._pending.popleft()
        seconds = sum(self._seconds(first, second) for first, second in window.segments)
        values = window.given | dict(zip(window.names, window.values.tolist(), strict=True))
        share = None if self._wait is None or seconds <= 0 else min(1.0, window.waited / seconds)
        return Window(window.step, window.steps, seconds, window.tokens, window.sequence_length, values, share)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1000 if self.device.type == "cuda" else float(second - first)


class DataWait:
    """Measures the time in which the training loop waits for its next batch, on the host's clock.

    Where the host runs ahead of the device, a short wait costs nothing; a share near 1 means that loading is too slow.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        self._seconds = 0.0
        # Lightning calls these around `next()`. Attributes of the instance hide its methods, and
        # are removed in `stop`.
        before, after = loop._on_before_fetch, loop._on_after_fetch

        def begin() -> None:
            self._begun = time.perf_counter()
            before()

        # The wait begins before Lightning's own timer, and ends behind it.
        def end() -> None:
            after()
            self._seconds += time.perf_counter() - self._begun

        loop._on_before_fetch, loop._on_after_fetch = begin, end
        self._loop = loop

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def stop(self) -> None:
        """Stop measuring."""
        restore(self._loop, "_on_before_fetch", "_on_after_fetch")


def current_loss(trainer: pl.Trainer, outputs: Any) -> Tensor | None:
    """Return the loss of the last step without waiting for the device; the global loss if the strategy knows it."""
    report = getattr(trainer.strategy, "report", None)
    if report is not None:
        return report.loss if isinstance(report.loss, Tensor) else None
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    # Lightning's automatic optimization has divided it by the number of batches whose gradients are added up
    divided = trainer.lightning_module is not None and trainer.lightning_module.automatic_optimization
    return loss * trainer.accumulate_grad_batches if divided else loss


def last_step(trainer: pl.Trainer) -> int | None:
    """Return the number of optimizer steps at the end of the run, if the trainer knows it."""
    batches = trainer.num_training_batches
    passes = trainer.max_epochs
    counts = [trainer.max_steps] if trainer.max_steps > 0 else []
    if passes is not None and passes > 0 and batches != float("inf"):
        # Several limits: the first one that is reached ends the run.
        counts.append(math.ceil(batches / trainer.accumulate_grad_batches) * passes)
    return min(counts, default=None)


PEAK_TFLOPS = {
    "GB200": 2450,
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 150,
    "A10G": 70,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "MI300X": 1307,
    "MI250X": 383,
}
"""Dense bf16 peaks of the vendors in TFLOP/s, by a part of the device's name; the first match counts."""


def rates(
    window: Window, trainer: pl.Trainer, module: pl.LightningModule, peak_tflops: float | None = None
) -> dict[str, float]:
    """Return the metrics of a window, with units in their names. Metrics that cannot be known are absent."""
    device, devices = trainer.strategy.root_device, trainer.world_size
    figures = {"memory_gib": memory_gib(device)}
    if not window.steps or window.seconds <= 0:
        return figures
    figures["step_time_s"] = window.seconds / window.steps
    if window.data_wait is not None:
        figures["data_wait_percent"] = 100 * window.data_wait
    if not window.tokens:
        return figures
    speed = window.tokens / window.seconds
    figures |= {"tokens_per_s": speed, "tokens_per_s_per_device": speed / devices}
    # FLOPs of attention grow with the length, so it is part of the question.
    flops = flops_per_token(module, window.sequence_length)
    if flops is None:
        return figures
    tflops = speed / devices * flops / 1e12
    figures["tflop_per_s_per_device"] = tflops
    peak = peak_tflops or peak_of(device)
    if peak is not None:
        figures["mfu_percent"] = 100 * tflops / peak
    return figures


def flops_per_token(module: pl.LightningModule, sequence_length: int) -> float | None:
    """Return training FLOPs per token from the module or its ``config``; None if neither counts them."""
    for owner in (module, getattr(module, "config", None)):
        count = getattr(owner, "flops_per_token", None)
        if callable(count):
            return float(count(sequence_length))
    return None


def peak_of(device: torch.device) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s; None for CPUs and unknown devices."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # Whole words: "H20" must not match "H200".
    return next((peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def memory_gib(device: torch.device) -> float:
    """Return the highest memory use so far in GiB: in use by torch on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return peak_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # macOS reports bytes, Linux KiB
