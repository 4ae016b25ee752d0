"""On a GPU with little memory, the number of samples per micro-batch is found without running out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megalight.strategies import MegatronStrategy

pytestmark = pytest.mark.gpu
LAYERS = 8
BYTES_PER_LAYER = 8 * 2**20


class Wide(pl.LightningModule):
    """Keeps about 128 MiB of activations per sample, in many tensors, as models do.

    Were there a single large one, the workspace of the first product could take a corner of its freed block for good,
    and a resumed run, which begins with as many samples as fit, would need one block more than was measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(1, 1), nn.Tanh())))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        wide = batch[0].expand(-1, BYTES_PER_LAYER // 4, -1)
        return self.net(wide).mean()

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


def fit(steps: int, ckpt_path: str | None = None) -> tuple[pl.Trainer, Wide]:
    """Train on equal batches, so that a resumed run sees those of the first."""
    torch.manual_seed(1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = MegatronStrategy(micro_batch_size="auto")
    trainer = pl.Trainer(accelerator="gpu", devices=1, max_steps=steps, strategy=strategy, **quiet)
    rows = torch.linspace(-1, 1, 128)[:, None, None].repeat(12, 1, 1)
    module = Wide()
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=128), ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.usefixtures("_little_memory")
def test_the_number_fits() -> None:
    trainer, _ = fit(12)
    sizes: Any = trainer.strategy.micro_batches  # type: ignore[attr-defined]
    assert sizes.found
    assert 2 <= sizes.size < 64


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("steps", [2, 9])
def test_a_run_that_resumes_ends_as_one_that_was_never_cut_off(steps: int, tmp_path: Path) -> None:
    """After two steps the number is not known yet, and is found again; after nine it is read."""
    whole, expected = fit(12)
    first, _ = fit(steps)
    first.save_checkpoint(tmp_path / "cut.ckpt")
    found: Any = first.strategy.micro_batches  # type: ignore[attr-defined]
    assert found.found is (steps == 9)
    resumed, module = fit(12, str(tmp_path / "cut.ckpt"))
    assert resumed.global_step == 12
    again: Any = resumed.strategy.micro_batches  # type: ignore[attr-defined]
    known: Any = whole.strategy.micro_batches  # type: ignore[attr-defined]
    assert again.found
    assert again.size == known.size
    if steps == 9:
        assert again.size == found.size
    for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
