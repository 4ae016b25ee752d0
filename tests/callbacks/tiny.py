"""A LightningModule that trains in no time, and a quiet Trainer for it, under Lightning's own strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.types import TokenBatch

ROWS, LENGTH, BATCHES = 2, 8, 12


class Batches(torch.utils.data.Dataset[TokenBatch]):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> TokenBatch:
        tokens = torch.full((ROWS, LENGTH), index % 5)
        return TokenBatch(tokens, tokens, torch.ones(ROWS, LENGTH))


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.table(batch.tokens).flatten(0, 1), batch.labels.flatten())

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=1)

    def flops_per_token(self, sequence_length: int) -> float:
        return 1e9 * sequence_length

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Batches(), batch_size=None)

    val_dataloader = train_dataloader


def tiny_trainer(**options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "log_every_n_steps": 4,
    }
    return pl.Trainer(**{**defaults, **options})
