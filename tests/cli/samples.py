"""Classes that the command line's tests name on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megalight.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SampleSize:
    hidden_size: int = 4
    num_layers: int = 2

    def __post_init__(self) -> None:
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size is {self.hidden_size}; it must be even. Use {self.hidden_size + 1}.")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    size: SampleSize = field(default_factory=SampleSize)
    activation: str = "silu"


class SampleModule(pl.LightningModule):
    def __init__(self, config: SampleConfig, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layer = nn.Linear(config.size.hidden_size, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class SampleWriter(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")


class UntypedModule(SampleModule):
    def __init__(self, config=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__(SampleConfig())


class SampleData(pl.LightningDataModule):
    def __init__(self, samples: int = 8, features: int = 4) -> None:
        super().__init__()
        self.samples = samples
        self.features = features

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(self.samples, self.features)), batch_size=2)

    val_dataloader = train_dataloader


class SampleStrategy(SingleDeviceStrategy):
    def __init__(self, tensor_parallel: int = 1, sequence_parallel: bool = False) -> None:
        if tensor_parallel > 1:
            raise ValueError(f"tensor_parallel is {tensor_parallel}; this strategy has 1 device.")
        super().__init__(device="cpu")


class TornData(SampleData):
    """Every rank finds its data torn."""

    def setup(self, stage: str) -> None:
        raise DataError("samples.bin is torn at byte 12")


PROBE = """
import contextlib, io, json, sys
from megalight.cli.main import main
answers = []
for words in json.loads(sys.stdin.read()):
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        answers.append([main(words), text.getvalue()])
print(json.dumps([answers, sorted({"torch", "torch._dynamo", "lightning"} & set(sys.modules))]))
"""
"""Runs commands, and says what they answered and which heavy packages they have imported."""
