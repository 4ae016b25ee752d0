"""Your own one-device model, split over two ranks by a plan of three lines.

python examples/own_model.py --devices 2 --tensor-parallel 2
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megalight.models.module import Carry, MegalightModule
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, Row
from megalight.strategies import MegatronStrategy
from megalight.types import Loss


class Perceptron(nn.Module):
    """A classifier of points on the plane, written for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 64)
        self.leave = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.relu(self.enter(x)))


class Classifier(MegalightModule):
    """The contract: build the model, run it, sum the losses, count the samples."""

    def build_model(self) -> nn.Module:
        return Perceptron()

    def plan(self, model: nn.Module) -> ParallelizePlan:
        return ParallelizePlan({"enter": Column(), "leave": Row()})

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        return {"logits": model(batch[0])}

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        return Loss(sum=nn.functional.cross_entropy(carry["logits"], batch[1], reduction="sum"))

    def loss_tokens(self, batch: Any) -> Tensor:
        return torch.tensor(float(len(batch[1])), device=batch[1].device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    options = parser.parse_args()
    pl.seed_everything(0)
    points = torch.randn(1024, 2)
    labels = (points.norm(dim=1) * 1.5).long().clamp(max=2)
    data = TensorDataset(points, labels)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=MegatronStrategy(tensor_parallel=options.tensor_parallel, micro_batch_size=32),
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=256))
    if trainer.is_global_zero:
        print(f"validation loss: {float(trainer.callback_metrics['val_loss']):.5f}")


if __name__ == "__main__":
    main()
