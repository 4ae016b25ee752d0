"""A script whose run is forked and gets SIGTERM in one of its ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from megalight.strategies import MegatronStrategy


class Signalled(pl.LightningModule):
    """In its third step, rank 1 is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    torch.set_num_threads(1)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = MegatronStrategy(start_method="fork", sigterm_every_n_steps=1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=2000, enable_model_summary=False, **quiet
    )
    try:
        trainer.fit(Signalled(), torch.utils.data.DataLoader(torch.ones(8000, 4), batch_size=1))
    finally:
        print("status", trainer.state.status, flush=True)


if __name__ == "__main__":
    main()
