"""Models of ``transformers`` split by what they declare, or by their form: loss and gradients are the plain model's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model_plans import plan_for
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Boundary, Column, Replicated, Row
from tests.parallel.tiny_transformers import errors_of, tiny, trained
from tests.support.workers import run
from tools.transformers_table import RESULTS, attempt

TABLE: dict[str, dict[str, list[str]]] = json.loads(RESULTS.read_text())

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


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"tensor_parallel": 2}),
        ("qwen3_moe", {"expert_parallel": 2}),
        ("gpt_oss", {"expert_parallel": 2}),  # transposed, with biases
    ],
)
def test_a_plain_module_needs_one_argument(family: str, options: dict[str, Any]) -> None:
    for errors in run(trained, 2, family, options):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(TABLE))
def test_the_table_holds(family: str) -> None:
    layouts = [name for name, (word, _) in TABLE[family].items() if word == "ok" and name != "built"]
    for layout in layouts:
        assert attempt(family, [layout])[layout] == ["ok", ""], layout


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
    model = tiny("qwen3_moe")
    plan = plan_for(model) or ParallelizePlan()
    with pytest.raises(LayoutError, match="alone; set tp=1"):
        parallelize(model, plan, ParallelMesh(4, 0, tp=2, ep=2))
    found = run(_refused, 2, "qwen2", False, "attention_dropout")[0]
    assert "self_attn (Qwen2Attention) draws attention_dropout=0.1" in found


def test_an_unknown_declaration_is_refused() -> None:
    model = tiny("qwen2")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "diagonal"}  # type: ignore[assignment]
    with pytest.raises(LayoutError, match="declares 'diagonal'"):
        plan_for(model)
