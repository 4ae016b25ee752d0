"""Hybrids with Mamba-2 under all layouts: the same losses, gradients and weights as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalight.errors import LayoutError
from megalight.inference import load_model
from megalight.models.gpt import GPT, GPTConfig, MambaConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.models.stored import open_model
from megalight.nn.canonical import canonical_tensors
from megalight.nn.moe import MoEConfig
from megalight.parallel.apply import parallelize
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import PipelineOptions
from tests.strategies.test_layout_changes import Again
from tests.strategies.training import CONFIGS, Gradients, assert_same_gradients, assert_same_run, by_hand, fit
from tests.support.workers import run

HYBRID = replace(
    CONFIGS["gqa"],
    num_layers=4,
    layer_pattern="M*-M",
    mamba=MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2),
)
PP = {"pipeline_parallel": 2, "micro_batch_size": 1}
TP = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"recompute": RecomputeOptions(granularity="selective", modules=("*_norm", "mamba", "mlp.act"))}),
    (2, {**TP, "recompute": RecomputeOptions(granularity="full", num_layers=2)}),
    pytest.param(2, {"tensor_parallel": 2}, marks=pytest.mark.full),
    (2, {"context_parallel": 2}),
    pytest.param(4, {**PP, **TP, "virtual_pipeline": 2}, marks=pytest.mark.full),
]

WIDE: list[tuple[int, dict[str, Any]]] = [
    (2, {**PP, "pipeline": PipelineOptions(schedule="zero_bubble")}),
    (2, {**PP, "pipeline_layout": "Ettt|tL"}),
    (4, {"tensor_parallel": 2, "context_parallel": 2}),
    (4, {"context_parallel": 4}),
    (4, {"context_parallel": 2, "context": ContextOptions("ring"), "tensor_parallel": 2, "sequence_parallel": True}),
]
NORMS = {groups: replace(HYBRID, mamba=replace(HYBRID.mamba, norm_groups=groups)) for groups in (1, 2, 8)}
DIVIDED: list[Any] = [
    pytest.param(2, 1, {"tensor_parallel": 2}, marks=pytest.mark.full),
    (2, 1, {**TP, "recompute": RecomputeOptions(granularity="selective", modules=("mamba",))}),
    (4, 2, {"tensor_parallel": 4, "sequence_parallel": True}),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            (2, 1, {"context_parallel": 2}),
            (2, 8, {"tensor_parallel": 2}),
            (4, 1, {"tensor_parallel": 4}),
            (4, 1, {**PP, **TP}),
            (4, 1, {**TP, "context_parallel": 2}),
        ]
    ],
]
"""Ranks, groups of the norm, and layouts."""
EXPERTS = replace(HYBRID, layer_pattern="M*EM", moe=MoEConfig(num_experts=4, ffn_hidden_size=12))


@functools.cache
def expected(config: GPTConfig) -> dict[str, Any]:
    return by_hand(config, packed=True)


def _with_gradients(config: GPTConfig, options: dict[str, Any]) -> dict[str, Any]:
    gradients = Gradients()
    return {**fit(config, packed=True, extra_callbacks=[gradients], **options), "gradients": gradients.first}


def _rank(config: GPTConfig, options: dict[str, Any]) -> dict[str, Any]:
    return fit(config, packed=True, **options)


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS, ids=str)
def test_layout_trains_the_same_model(ranks: int, options: dict[str, Any]) -> None:
    assert_same_run(run(_rank, ranks, HYBRID, options)[0], expected(HYBRID))


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "options"), WIDE, ids=str)
def test_wide_layout_trains_the_same_model(ranks: int, options: dict[str, Any]) -> None:
    assert_same_run(run(_rank, ranks, HYBRID, options)[0], expected(HYBRID))


@pytest.mark.parametrize(("ranks", "groups", "options"), DIVIDED, ids=str)
def test_groups_of_the_norm_that_ranks_divide(ranks: int, groups: int, options: dict[str, Any]) -> None:
    found, wanted = run(_with_gradients, ranks, NORMS[groups], options)[0], expected(NORMS[groups])
    assert_same_run(found, wanted)
    assert_same_gradients(found["gradients"], wanted["gradients"])


def _saved(path: str) -> None:
    fit(NORMS[1], steps=1, extra_callbacks=[Again(path)], tensor_parallel=2)


def test_a_divided_norm_is_saved_whole(tmp_path: Path) -> None:
    run(_saved, 2, str(tmp_path / "saved.ckpt"))
    source, wanted = open_model(tmp_path / "saved.ckpt"), expected(NORMS[1])["initial"]
    ours = load_model(tmp_path / "saved.ckpt", dtype=torch.float64)
    assert source.config == NORMS[1]
    found = {"model." + name: tensor for name, tensor in canonical_tensors(ours).items()}
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(tensor.numpy(), wanted[name]) for name, tensor in found.items())


def test_layers_of_experts() -> None:
    options = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
    assert_same_run(run(_rank, 4, EXPERTS, options)[0], expected(EXPERTS))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tp": 3}, "units"),
        ({"cp": 3}, r"mamba\.tokens: 8 heads in 2 groups on each rank cannot be divided over cp=3"),
    ],
)
def test_degrees_that_do_not_divide(mesh: dict[str, int], message: str) -> None:
    with torch.device("meta"):
        model = GPT(HYBRID)
    (degree,) = mesh.values()
    with pytest.raises(LayoutError, match=message):
        parallelize(model, gpt_plan(model), ParallelMesh(degree, 0, **mesh))


def test_groups_that_cannot_be_divided() -> None:
    with torch.device("meta"):
        model = GPT(
            replace(HYBRID, mamba=MambaConfig(num_heads=12, head_dim=4, state_size=6, num_groups=2, norm_groups=3))
        )
    with pytest.raises(LayoutError, match=r"mamba\.norm\.weight consists of 3 units .*tp=2"):
        parallelize(model, gpt_plan(model), ParallelMesh(2, 0, tp=2))
