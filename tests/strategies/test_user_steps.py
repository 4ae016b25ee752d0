"""Steps of a subclass that call those of the family: each layout trains and counts like one device without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from megalight.nn.moe import BalanceConfig, MoEConfig, RouterConfig
from megalight.strategies import MegatronStrategy
from tests.strategies.training import ADAM, BASE, SEED, WithData, assert_same_run, fit
from tests.support.environment import trainer
from tests.support.workers import run

CONFIG = replace(
    BASE,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=12,
        router=RouterConfig(top_k=2, score="sigmoid", expert_bias=True, expert_bias_rate=1e-3),
        balance=BalanceConfig(aux_loss=0.1, z_loss=0.01),
    ),
)


class Validating(WithData):
    """What a subclass writes to do something beside each step."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.log("batches", 1.0, reduce_fx="sum", batch_size=1)


class Training(Validating):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("beside", 2 * loss.detach(), batch_size=1)
        return loss


class Biases(pl.Callback):
    """Keeps what routers add to the scores of experts."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        buffers = pl_module.model.named_buffers()
        self.found = {name: bias.tolist() for name, bias in buffers if name.endswith("expert_bias")}


def _fit(module: type[WithData], options: dict[str, Any]) -> dict[str, Any]:
    biases = Biases()
    validated = {"limit_val_batches": 1.0}
    result = fit(CONFIG, module_type=module, extra_callbacks=[biases], trainer_options=validated, **options)
    return {**result, "biases": biases.found}


@pytest.fixture(scope="module")
def expected() -> Any:
    (result,) = run(_fit, 1, WithData, {})
    assert len(result["biases"]) == CONFIG.num_layers
    assert any(max(bias) > 0 for bias in result["biases"].values())
    return result


@pytest.mark.parametrize("options", [{}, {"tensor_parallel": 2, "sequence_parallel": True}])
def test_losses_and_loads_of_experts_count_as_in_the_familys_own_step(options: dict[str, Any], expected: Any) -> None:
    for found in run(_fit, 2 if options else 1, Training, options):
        assert found["metrics"].pop("beside") > 0
        assert found["metrics"].pop("batches") == 2
        # The loss that a step of one's own returns, and that is reported, includes those of routers.
        assert_same_run({**found, "losses": expected["losses"]}, expected)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        assert found["biases"] == expected["biases"]


class ByHand(WithData):
    """Optimizes by itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()  # type: ignore[union-attr]


def _by_hand() -> dict[str, list[float]]:
    biases = Biases()
    trainer(MegatronStrategy(), callbacks=[biases], limit_val_batches=0, max_steps=1).fit(ByHand(CONFIG, ADAM, SEED))
    return biases.found


def test_loads_of_experts_count_in_manual_optimization() -> None:
    (biases,) = run(_by_hand, 1)
    assert all(max(bias) > 0 for bias in biases.values())


@pytest.mark.parametrize("options", [{}, {"expert_parallel": 2}])
def test_losses_of_validation_are_those_of_all_replicas(options: dict[str, Any]) -> None:
    own, theirs = (run(_fit, 2, module, options) for module in (Validating, WithData))
    for found, wanted in zip(own, theirs, strict=True):
        assert found["metrics"].pop("batches") == 2
        assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-12)
