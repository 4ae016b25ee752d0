"""Recompute in models of ``transformers``: the weights of one device in every layout, and less kept until then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel.options import DataParallelOptions
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions, apply_recompute, check_recompute
from megalight.strategies.validation import check_whole_models
from tests.parallel.test_recompute import saved, selective
from tests.parallel.tiny_transformers import tiny, trained
from tests.support.workers import run

pytest.importorskip("transformers")

FULL = RecomputeOptions(granularity="full")
PARTS = selective("mlp", "input_layernorm")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "full": (2, {"data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "pp2": (2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    "cp2": (2, {"context_parallel": 2}),
    "ep2": (2, {"expert_parallel": 2}),
}


def errors_of(cases: list[tuple[str, str, str]]) -> dict[str, dict[str, float]]:
    """Of each family, layout and kind of recompute."""
    found = {}
    for family, layout, kind in cases:
        options: dict[str, Any] = dict(LAYOUTS[layout][1])
        if kind != "own":
            options["recompute"] = {"full": FULL, "parts": PARTS}[kind]
        # As its own configuration does: its layers get a cache.
        found[f"{family} {layout} {kind}"] = trained(family, options, checkpointing=kind == "own", use_cache=True)
    return found


def check(cases: list[tuple[str, str, str]]) -> None:
    for errors in run(errors_of, 2, cases, timeout=60 * len(cases)):
        wrong = {case: {n: e for n, e in each.items() if not e <= 1e-9} for case, each in errors.items()}
        assert not any(wrong.values()), wrong


def test_weights_are_those_of_one_device() -> None:
    kinds = {"tp2": "parts", "full": "full", "pp2": "full", "cp2": "parts"}
    check([("qwen3", layout, kind) for layout, kind in kinds.items()] + [("mixtral", "ep2", "full")])


def test_layers_that_recompute_themselves() -> None:
    check([("qwen3", layout, "own") for layout in ("tp2", "full", "pp2", "cp2")])


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "deepseek_v3", "gpt_oss", "bamba", "bart", "falcon", "glm4"])
def test_families(family: str) -> None:
    check([(family, layout, kind) for layout in ("tp2", "full") for kind in ("full", "own")])


def kept(recompute: RecomputeOptions) -> int:
    """Bytes that a forward pass keeps for the backward."""
    model = tiny("qwen3")
    apply_recompute(model, recompute)
    with saved(model) as found:
        loss = model(input_ids=torch.arange(48).view(1, -1)).logits.sum()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def test_less_is_kept() -> None:
    everything, full, parts = kept(RecomputeOptions()), kept(FULL), kept(PARTS)
    assert full < 0.4 * everything
    assert full < parts < 0.8 * everything


def test_groups_of_layers() -> None:
    model = tiny("qwen3", num_hidden_layers=3)
    ids = torch.arange(8).view(1, -1)
    plain = torch.autograd.grad(model(input_ids=ids).logits.square().sum(), list(model.parameters()))
    apply_recompute(model, RecomputeOptions(granularity="full", num_layers=2))
    again = torch.autograd.grad(model(input_ids=ids).logits.square().sum(), list(model.parameters()))
    assert all(map(torch.equal, plain, again))


def test_refusals() -> None:
    own = nn.ModuleDict({"net": tiny("qwen3")})
    own["net"].gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match=r"net.model.layers.0 recomputes itself"):
        check_recompute(own, FULL)
    with pytest.raises(ConfigurationError, match=r"net.model \(.*recomputes with use_reentrant=True, which pp=2"):
        check_whole_models(own, ParallelMesh(2, pp=2))
    with pytest.raises(ConfigurationError, match="no module of any layer; modules inside a layer are self_attn"):
        check_recompute(tiny("qwen3"), selective("attention"))
    with pytest.raises(ConfigurationError, match="has none"):
        check_recompute(nn.ModuleDict({"net": tiny("ctrl")}), FULL)
