"""A small model of a user's own, of ``embed | layers | head``, with side outputs and a weight that all stages share."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.models.module import Carry, MegalightModule
from megalight.strategies import MegatronStrategy
from megalight.types import Loss
from tests.support.environment import trainer


class Toy(nn.Module):
    """Residual tanh layers; ``scale`` multiplies what each adds."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Linear(5, 8)
        self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(num_layers)})
        self.head: nn.Module | None = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.empty(8))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)

    def forward(self, x: Tensor, carry: Carry | None) -> Carry:
        if carry is None:
            assert self.embed is not None
            hidden, penalty, count = self.embed(x), x.new_zeros(()), torch.zeros(1, dtype=torch.int64, device=x.device)
        else:
            hidden, penalty, count = carry["hidden"], carry["penalty"], carry["count"]
        for layer in self.layers.values():
            added = torch.tanh(layer(hidden)) * self.scale
            hidden, penalty, count = hidden + added, penalty + 0.1 * added.square().mean(), count + 1
        return {"hidden": hidden if self.head is None else self.head(hidden), "penalty": penalty, "count": count}


class ToyModule(MegalightModule):
    """Regression; the penalty of all layers is an auxiliary loss."""

    def __init__(self, num_layers: int = 4, rows: int = 6) -> None:
        super().__init__(seed=3)
        self.num_layers = num_layers
        self.rows = rows

    def build_model(self) -> nn.Module:
        return Toy(self.num_layers)

    def forward_step(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry | None = None) -> Carry:
        output: Carry = model(batch["x"], carry)
        return output

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        assert int(carry["count"]) == self.num_layers
        error = carry["hidden"] - batch["y"]
        total = error.abs().sum().detach(), torch.tensor(float(error.numel()))
        return Loss(error.square().sum(), {"penalty": carry["penalty"]}, {"error": total})

    def loss_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(batch["y"].numel()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def _loader(self, start: int) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        batches = []
        for step in range(start, start + 3):
            draws = torch.Generator().manual_seed(step)
            x, y = (torch.randn(self.rows, size, generator=draws, dtype=torch.float64) for size in (5, 3))
            here = slice(share["rank"], None, share["num_replicas"])
            batches.append({"x": x[here], "y": y[here]})
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(0)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(50)

    predict_dataloader = val_dataloader


class Kept(pl.Callback):
    """All metrics after every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(module: MegalightModule, **options: Any) -> dict[str, Any]:
    """Train, validate and predict; returns metrics by step, the final ones, and predictions."""
    kept = Kept()
    runner = trainer(
        MegatronStrategy(**{"micro_batch_size": 1, **options}),
        callbacks=[kept],
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
    )
    runner.fit(module)
    final = {name: float(value) for name, value in runner.callback_metrics.items()}
    predicted = runner.predict(module)
    assert predicted is not None
    return {"steps": kept.seen, "final": final, "predicted": [p["hidden"].tolist() for p in predicted]}
