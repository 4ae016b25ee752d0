"""A script whose run is forked, and ended by a signal: to one of its ranks, or to the process that waits for them.

python -m tests.strategies.terminated             # SIGTERM to rank 1
python -m tests.strategies.terminated interrupt   # SIGINT to the main process alone, which then trains once more
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from megalight.strategies import MegatronStrategy


class Signaled(pl.LightningModule):
    """In its third step, rank 1 sends a signal to itself, or to the main process."""

    def __init__(self, interrupt: bool) -> None:
        super().__init__()
        self.interrupt = interrupt
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 2 and self.global_rank == 1:
            os.kill(*((os.getppid(), signal.SIGINT) if self.interrupt else (os.getpid(), signal.SIGTERM)))
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(steps: int, interrupt: bool) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = MegatronStrategy(start_method="fork")
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, enable_model_summary=False, **quiet
    )
    try:
        trainer.fit(Signaled(interrupt), torch.utils.data.DataLoader(torch.ones(8000, 4), batch_size=1))
    finally:
        print("status", trainer.state.status, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    # A shell lets jobs in the background ignore it, and so would all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "interrupt" not in sys.argv:
        fit(6, interrupt=False)
    with suppress(SystemExit):
        fit(200_000, interrupt=True)
    # As a cell after it: a notebook goes on.
    print("workers left:", len(multiprocessing.active_children()), flush=True)
    fit(2, interrupt=True)


if __name__ == "__main__":
    main()
