"""Models of ``transformers`` split by what they declare, or by their form: loss and gradients are the plain model's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.errors import LayoutError
from megalight.parallel.model_plans import plan_for
from megalight.parallel.styles import Boundary, Column, Replicated, Row
from megalight.strategies import MegatronStrategy
from tests.parallel.gathering import gather_canonical
from tests.parallel.tiny_transformers import errors_of, tiny
from tests.support.environment import trainer
from tests.support.workers import run

FAMILIES = {
    "qwen3": "norms of heads",
    "gemma2": "norms after layers, embedding that scales",
    "phi3": "halves in one layer, attention that cannot be divided",
    "gpt_neox": "queries, keys and values of each head in one layer",
    "deepseek_v3": "latent attention, shared experts",
    "gpt_oss": "sinks, experts with biases",
    "jamba": "mixers that are no attention",
    "gpt2": "no declaration: transposed weights in three sections",
    "bloom": "no declaration: ALiBi",
    "bert": "no declaration: projection outside of the attention, bias tied to one of the head",
    "bart": "no declaration: dropout, cross attention, feed-forward layers without a module",
}
"""What differs in each from those before."""


def _errors(families: list[str], sequence_parallel: bool) -> dict[str, dict[str, float]]:
    return {family: errors_of(family, sequence_parallel) for family in families}


def check(families: list[str], ranks: int, sequence_parallel: bool = False) -> None:
    for found in run(_errors, ranks, families, sequence_parallel, timeout=240):
        for family, errors in found.items():
            assert errors.pop("share of parameters") < 0.99, f"{family}: nothing is split"
            wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
            assert not wrong, f"{family}: {wrong}"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_models_compute_what_they_do_on_one_rank(sequence_parallel: bool) -> None:
    check([*FAMILIES], 2, sequence_parallel)


def test_more_ranks_than_key_heads() -> None:
    check(["qwen3", "gemma2"], 4)


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
    plan = plan_for(tiny("phi3"))
    assert plan is not None
    assert plan.rules["model.layers.0.mlp.gate_up_proj"] == Column(sizes=(48, 48), tokens="gathered")
    assert plan.rules["model.layers.0.mlp.down_proj"] == Row()
    # Its features have an order that no shape tells, and every rank computes it with all tokens.
    assert plan.rules["model.layers.0.self_attn"] == Boundary(enter="join", leave="split")


def test_what_is_not_known_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("opt")
    model.model.decoder.layers[1].self_attn.out_proj = nn.Bilinear(32, 32, 32)  # type: ignore[union-attr, index]
    with caplog.at_level("INFO", "megalight.parallel.structural_plan"):
        plan = plan_for(model)
    assert plan is not None
    assert plan.rules["model.decoder.layers.0.self_attn.q_proj"] == Column(units=4, tokens="gathered")
    assert plan.rules["model.decoder.layers.1.self_attn.q_proj"] == Replicated()
    assert (
        "OPTForCausalLM declares no plan: 3 attention and feed-forward layers split by their structure" in caplog.text
    )
    assert "whole on each rank: model.decoder.layers.1.self_attn (OPTAttention: its projections are of" in caplog.text


def test_two_models_in_a_module_are_both_found() -> None:
    both = torch.nn.ModuleDict({"one": tiny("qwen2"), "inner": torch.nn.ModuleDict({"two": tiny("llama")})})
    plan = plan_for(both)
    assert plan is not None
    assert "one.model.layers.0.mlp.up_proj" in plan.rules
    assert "inner.two.model.layers.0.mlp.up_proj" in plan.rules


def _refused(family: str, sequence_parallel: bool, dropout: str = "") -> str:
    with pytest.raises(LayoutError) as error:
        errors_of(family, sequence_parallel, **({dropout: 0.1} if dropout else {}))
    return str(error.value)


def test_layouts_are_refused_by_name() -> None:
    assert "consists of 2 units (heads, groups, or features), and tp=3" in run(_refused, 3, "qwen3", False)[0]
    assert "model.decoder.layers.0 (OPTDecoderLayer) calls reshape" in run(_refused, 2, "opt", True)[0]
    assert "layers.0 (BartDecoderLayer) draws dropout=0.1 itself" in run(_refused, 2, "bart", True, "dropout")[0]
    found = run(_refused, 2, "qwen2", False, "attention_dropout")[0]
    assert "self_attn (Qwen2Attention) draws attention_dropout=0.1" in found


def test_an_unknown_declaration_is_refused() -> None:
    model = tiny("qwen2")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "diagonal"}  # type: ignore[assignment]
    with pytest.raises(LayoutError, match="declares 'diagonal'"):
        plan_for(model)
