"""A plain LightningModule, its data, and the same training by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from megalight.strategies import DataParallelOptions, MegatronStrategy
from tests.support.environment import trainer


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``[count, 5]`` features and ``[count, 2]`` targets, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


class Plain(pl.LightningModule):
    """What any Lightning user writes."""

    def __init__(self, optimizer: str = "AdamW", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.optimizer, self.parameters())


class Turns(Plain):
    """Heads take turns, one layer is never used, and others are frozen for a while or for one micro-batch."""

    def __init__(self, optimizer: str, seed: int = 0, *, same: bool, frozen_at_first: bool = False) -> None:
        super().__init__(optimizer, seed)
        self.same = same
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(2))
        self.spare = nn.Linear(3, 3)
        if frozen_at_first:
            self.net[0].requires_grad_(False)

    def begin_epoch(self, epoch: int) -> None:
        """The first layer is trained from the second epoch on, the second one up to then."""
        self.net[0].requires_grad_(epoch > 0)
        self.net[2].requires_grad_(epoch == 0)

    def loss(self, batch: tuple[Tensor, Tensor], step: int, rank: int) -> Tensor:
        head = (step // 2 + (0 if self.same else rank * (step % 2))) % 2
        for each in self.heads:
            each.bias.requires_grad_(step == 1)  # type: ignore[union-attr]
        found: Tensor = nn.functional.mse_loss(self.heads[head](self.net(batch[0])), batch[1])
        return found

    def on_train_epoch_start(self) -> None:
        self.begin_epoch(self.current_epoch)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx, torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    options = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.02, "weight_decay": 0.1}}[name]
    return getattr(torch.optim, name)(parameters, **options)


def batches(count: int, size: int, shuffle: bool = False, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(count, seed)), batch_size=size, shuffle=shuffle)


def strategy(level: str = "optim", **options: Any) -> MegatronStrategy:
    return MegatronStrategy(data_parallel=DataParallelOptions(level=level), **options)  # type: ignore[arg-type]


def fit(module: pl.LightningModule, loader: Any, how: MegatronStrategy | None = None, **options: Any) -> pl.Trainer:
    """Fit in this rank; returns the Trainer."""
    runner = trainer(how or strategy(), **{"max_steps": -1, "max_epochs": 1, "limit_val_batches": 0, **options})
    runner.fit(module, loader)
    return runner


def weights(module: nn.Module) -> list[list[float]]:
    return [parameter.detach().double().reshape(-1).tolist() for parameter in module.parameters()]


def dealt(count: int, size: int, ranks: int, epoch: int = 0) -> list[list[tuple[Tensor, Tensor]]]:
    """Each step's batch on each rank: in order on one, else as Lightning's injected DistributedSampler deals them."""
    x, y = samples(count)
    if ranks == 1:
        return [[batch] for batch in zip(x.split(size), y.split(size), strict=True)]
    shares = []
    for rank in range(ranks):
        sampler: DistributedSampler[Any] = DistributedSampler(range(count), ranks, rank)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        rows = torch.tensor(list(sampler)).split(size)
        shares.append([(x[row], y[row]) for row in rows])
    return [list(step) for step in zip(*shares, strict=True)]


def by_hand(
    module: Plain, steps: list[list[tuple[Tensor, Tensor]]], loss: Callable[..., Tensor] = nn.functional.mse_loss
) -> list[list[float]]:
    """Each step's loss is the mean of the means of its batches; returns the final weights."""
    module = module.double()
    optimizer = make_optimizer(module.optimizer, module.parameters())
    for step in steps:
        optimizer.zero_grad()
        sum(loss(module(x), y) / len(step) for x, y in step).backward()  # type: ignore[union-attr]
        optimizer.step()
    return weights(module)
