from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from megalight.callbacks import UseBackends
from megalight.errors import ConfigurationError
from megalight.ops.norm import RMS_NORM, NormSpec, rms_norm

SPEC = NormSpec("cpu", torch.float32, torch.float32, 8)


class Model(pl.LightningModule):
    """Notes which norm runs in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.ran: list[str] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.ran.append(RMS_NORM.select(SPEC).name)
        return rms_norm(batch, self.weight, 1e-5).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(callback: pl.Callback) -> Model:
    model = Model()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=2, callbacks=[callback], enable_model_summary=False, barebones=False, **options
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(4, 8), batch_size=2))
    return model


def test_a_run_uses_what_was_named() -> None:
    assert RMS_NORM.select(SPEC).name == "torch"
    assert fit(UseBackends({"rms_norm": "reference"})).ran == ["reference", "reference"]
    assert RMS_NORM.select(SPEC).name == "torch", "another run starts as usual"


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no op 'norm'; known: .*rms_norm"):
        fit(UseBackends({"norm": "reference"}))
