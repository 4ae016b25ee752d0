"""Logs the speed of training: tokens/s, TFLOP/s, share of the device's peak, step time, memory."""

from __future__ import annotations

import re
import resource
import sys
from typing import Any

import lightning.pytorch as pl
import torch

from megalight.callbacks.timing.meter import StepMeter, Window
from megalight.errors import ConfigurationError

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


class Throughput(pl.Callback):
    """Logs the mean speed every ``log_every_n_steps`` steps, without validation, to every logger.

    FLOPs come from the module's ``flops_per_token(sequence_length)``: six per matmul parameter, and causal attention.
    Metrics that cannot be known (FLOPs of another model, peak of a device) are not logged.

    Nothing waits for the device: each row is written about a step late, under the step that it belongs to.

    Logs:
        tokens_per_s: tokens per second on all devices.
        tokens_per_s_per_device: the same, divided by the number of devices.
        tflop_per_s_per_device: FLOPs of the model per second and device, in 10^12. Recomputation does not count.
        mfu_percent: ``tflop_per_s_per_device`` as a share of the device's peak.
        step_time_s: seconds per optimizer step.
        data_wait_percent: share of the time in which the host waited for batches.
        memory_gib: highest memory use so far; allocated on GPUs, resident on CPUs.

    Args:
        peak_tflops: peak of one device, for ``mfu_percent``. None: looked up by the name of the device; CPUs have none.

    Raises:
        ConfigurationError: ``peak_tflops`` is not positive.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ConfigurationError(f"peak_tflops is {peak_tflops}; it must be above 0, or null to look it up.")
        self.peak_tflops = peak_tflops
        self._meter: StepMeter | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start measuring."""
        # Other ranks take as long, so one rank measures.
        self._meter = StepMeter(trainer.strategy.root_device) if trainer.is_global_zero else None
        if self._meter is not None:
            self._meter.start(trainer.global_step, trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and log windows that the device has finished."""
        if self._meter is None:
            return
        self._meter.add(trainer, batch)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and self._meter.due(trainer, every):
            self._meter.close(trainer.global_step, {})
        self._write(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is not training time."""
        if self._meter is not None:
            self._meter.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restart the clock."""
        if self._meter is not None:
            self._meter.resume()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the last windows."""
        self._write(trainer, pl_module, wait=True)
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop measuring."""
        self._stop()

    def _stop(self) -> None:
        if self._meter is not None:
            self._meter.stop()
            self._meter = None

    def _write(self, trainer: pl.Trainer, module: pl.LightningModule, wait: bool = False) -> None:
        # Several windows may have ended since the last call.
        while self._meter is not None and (window := self._meter.poll(wait)) is not None:
            for logger in trainer.loggers:
                logger.log_metrics(rates(window, trainer, module, self.peak_tflops), step=window.step - 1)


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
    """Return the highest memory use so far in GiB: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # macOS reports bytes, Linux KiB
