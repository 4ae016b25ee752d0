"""An ordinary LightningModule, unchanged, under MegatronStrategy: replicas with sharded optimizer state.

python examples/plain_lightning.py --devices 2
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megalight.strategies import MegatronStrategy


class Regression(pl.LightningModule):
    """Learns ``y = sin(3 x)``. Nothing here is Megalight's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    options = parser.parse_args()
    pl.seed_everything(0)
    x = torch.rand(1024, 1) * 2 - 1
    data = TensorDataset(x, torch.sin(3 * x))
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=MegatronStrategy(),
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Regression()
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=256))
    if trainer.is_global_zero:
        print(f"validation loss: {float(trainer.callback_metrics['val_loss']):.5f}")


if __name__ == "__main__":
    main()
