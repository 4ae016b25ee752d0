"""Models of ``transformers`` split by what they declare: loss and gradients are those of the plain model."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megalight.errors import ConfigurationError, LayoutError
from megalight.parallel.model_plans import declared_plan, plan_for
from megalight.parallel.styles import Column, Replicated, Row
from megalight.strategies import MegatronStrategy
from tests.parallel.gathering import gather_canonical
from tests.parallel.tiny_transformers import errors_of, tiny
from tests.support.environment import trainer
from tests.support.workers import run

FAMILIES = ["qwen3", "gemma2", "phi3", "olmo2", "gpt_neox", "deepseek_v3", "gpt_oss", "qwen3_moe", "starcoder2"]
"""They differ in head norms, fused layers, whole attention, fused heads, latent attention, sinks, experts, biases."""


def _errors(families: list[str]) -> dict[str, dict[str, float]]:
    return {family: errors_of(family) for family in families}


def check(families: list[str], ranks: int, tolerance: float) -> None:
    for found in run(_errors, ranks, families, timeout=240):
        for family, errors in found.items():
            assert errors.pop("share of parameters") < 0.99, f"{family}: nothing is split"
            wrong = {name: error for name, error in errors.items() if not error <= tolerance}
            assert not wrong, f"{family}: {wrong}"


def test_a_declared_plan_computes_what_the_model_does() -> None:
    check(FAMILIES, 2, 1e-9)


def test_more_ranks_than_key_heads() -> None:
    # Their norms compute in float32, where a sum of four terms in another order rounds otherwise.
    check(["qwen3", "gemma2"], 4, 1e-6)


class Plain(pl.LightningModule):
    """What a user writes: nothing in it is about parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny("qwen2")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.net(batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _trained(options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    data = torch.randint(96, (6, 8), generator=torch.Generator().manual_seed(0))
    module, strategy = Plain(), MegatronStrategy(**options)
    runner = trainer(strategy, max_steps=3)
    runner.fit(module, DataLoader(data, batch_size=2))
    strategy.sync_parameters()
    named = {name: p.detach().clone() for name, p in module.named_parameters()}
    return float(runner.callback_metrics["loss"]), gather_canonical(named, strategy.specs, strategy.mesh)


def test_a_plain_module_needs_one_argument() -> None:
    loss, weights = run(_trained, 1, {})[0]
    for found, theirs in run(_trained, 2, {"tensor_parallel": 2}):
        assert found == pytest.approx(loss, rel=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-8, atol=1e-9)


def test_fused_halves_are_split_one_by_one() -> None:
    plan = declared_plan(tiny("phi3"))
    assert plan.rules["model.layers.0.mlp.gate_up_proj"] == Column(sizes=(48, 48), tokens="whole")
    assert plan.rules["model.layers.0.mlp.down_proj"] == Row()
    assert plan.rules["model.layers.0.self_attn.qkv_proj"] == Replicated()


def test_two_models_in_a_module_are_both_found() -> None:
    both = torch.nn.ModuleDict({"one": tiny("qwen2"), "inner": torch.nn.ModuleDict({"two": tiny("llama")})})
    plan = plan_for(both)
    assert plan is not None
    assert "one.model.layers.0.mlp.up_proj" in plan.rules
    assert "inner.two.model.layers.*.mlp.up_proj" in plan.rules


def _refused() -> str:
    with pytest.raises(LayoutError) as error:
        errors_of("qwen3")
    return str(error.value)


def test_more_ranks_than_heads_are_refused() -> None:
    assert "consists of 2 units (heads, groups, or features), and tp=3" in run(_refused, 3)[0]


def test_attention_dropout_is_refused() -> None:
    model = tiny("qwen2")
    model.config.attention_dropout = 0.1  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="set attention_dropout=0"):
        declared_plan(model)


def test_an_unknown_declaration_is_refused() -> None:
    model = tiny("qwen2")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "diagonal"}  # type: ignore[assignment]
    with pytest.raises(LayoutError, match="declares 'diagonal'"):
        declared_plan(model)
