"""Cost of the NVTX callback: host time of one range and, on a GPU, a training step with and without it.

    python benchmarks/nvtx.py                  # host time of one range
    python benchmarks/nvtx.py --device cuda    # also whole steps: without and with, in turn

A step with 32 layers and 8 micro-batches opens about 600 ranges.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import timeit
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalight.callbacks import NVTX
from megalight.callbacks.profiling import Ranges

BLOCKS, WIDTH, TOKENS, STEPS, WARMUP, TURNS = 24, 2048, 4096, 40, 10, 3


class Silent:
    """Replaces ``torch.cuda.nvtx`` with empty functions, so that only the callback's own time is measured."""

    def range_push(self, label: str) -> None: ...

    def range_pop(self) -> None: ...

    def range_start(self, label: str) -> int:
        return 0

    def range_end(self, handle: int) -> None: ...


def microseconds_per_range() -> float:
    """Return the host time to open and close one range: the fastest of many tries, as others may use the machine."""
    ranges = Ranges(Silent())

    def work() -> None:
        for index in range(8):
            ranges.begin("forward", {"chunk": 0, "micro_batch": index})
            ranges.end("forward")

    return min(timeit.repeat(work, number=10, repeat=50)) / 80 * 1e6


class Wide(pl.LightningModule):
    """A model with so many blocks that the cost of ranges could show, and so much work that the GPU is busy.

    Its weights are drawn on the GPU: drawing them on the host would take longer than all steps.
    """

    def configure_model(self) -> None:
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class StepTimes(pl.Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: object) -> None:
        torch.cuda.synchronize()
        self.start = time.perf_counter()

    def on_train_batch_end(self, *args: object) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)


def milliseconds_per_step(callbacks: list[pl.Callback], rows: Tensor) -> float:
    """Return the median step time on a GPU."""
    times = StepTimes()
    runner = pl.Trainer(
        accelerator="gpu", devices=1, precision="bf16-true", max_steps=STEPS, callbacks=[*callbacks, times],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    runner.fit(Wide(), DataLoader(rows, batch_size=None))
    return 1e3 * statistics.median(times.seconds[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    print(f"one range: {microseconds_per_range():.1f} us of host time")
    if device == "cuda":
        rows = torch.randn(STEPS, TOKENS, WIDTH, dtype=torch.bfloat16)
        for _ in range(TURNS):
            without, marked = milliseconds_per_step([], rows), milliseconds_per_step([NVTX()], rows)
            print(f"one step: {without:.2f} ms without, {marked:.2f} ms with NVTX ({marked / without - 1:+.1%})")


if __name__ == "__main__":
    main()
