"""On a GPU with little memory, the number of samples per micro-batch is found without running out of it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megalight.strategies import MegatronStrategy

pytestmark = pytest.mark.gpu
BYTES_PER_SAMPLE = 64 * 2**20


class Wide(pl.LightningModule):
    """Keeps about 64 MiB of activations per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        wide = batch[0].expand(-1, BYTES_PER_SAMPLE // 4, -1)
        return self.net(wide).tanh().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def _little_memory():
    """Room for about 4 GiB."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("_little_memory")
def test_the_number_fits() -> None:
    strategy = MegatronStrategy(micro_batch_size="auto")
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="gpu", devices=1, max_steps=12, strategy=strategy, **options)
    loader = DataLoader(TensorDataset(torch.randn(128 * 12, 1, 1)), batch_size=128)
    trainer.fit(Wide(), loader)
    sizes = strategy.micro_batches
    assert sizes is not None
    assert sizes.found
    assert 2 <= sizes.size < 64
