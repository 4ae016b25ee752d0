"""What a transform may do, and when, by one that is not Megalight's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megalight
from megalight.errors import LayoutError
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.models.transforms import LoRA, describe, rebuild
from megalight.nn.init import initialize
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.shard import ShardSpec
from megalight.parallel.styles import Row
from megalight.parallel.tensor.linear import RowLinear
from megalight.parallel.transform import TRANSFORMS, ModelTransform, apply_transforms, register
from tests.parallel.test_apply import BASE
from tests.support.workers import run


@dataclass(frozen=True)
class Draft(ModelTransform):
    """A linear layer beside the head, and the largest weight of each rank's part of it."""

    name: ClassVar[str] = "draft"
    width: int

    def change(self, model: nn.Module) -> None:
        model.draft = nn.Linear(model.config.hidden_size, self.width, bias=False)

    def plan(self, model: nn.Module, plan: ParallelizePlan) -> ParallelizePlan:
        return plan | ParallelizePlan({"draft": Row()})

    def change_split(self, model: ParallelModel) -> Mapping[str, ShardSpec]:
        layer = model.root.draft
        layer.register_buffer("largest", torch.full((1,), torch.nan, device=layer.weight.device))
        rank, size = model.mesh.rank("tp"), model.mesh.tp
        assert layer.weight.shape == (self.width, BASE["hidden_size"] // size)
        name = f"model.draft.largest.{rank}"  # each rank has one of its own
        return {"draft.largest": ShardSpec.replicated(name, (1,))}

    def with_values(self, model: ParallelModel) -> None:
        layer = model.root.draft
        assert bool(layer.weight.isfinite().all())
        layer.largest.copy_(layer.weight.detach().abs().max())


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRANSFORMS, "_entries", dict(TRANSFORMS._entries))
    register(Draft)


def built() -> tuple[str, float, list[str]]:
    mesh = ParallelMesh(2, dist.get_rank(), tp=2)
    with torch.device("meta"):
        model = GPT(GPTConfig(**BASE))
    options = Layout(transforms=(Draft(6),))
    parallel = ParallelModel.build(model, mesh, options, seed=3)
    assert isinstance(model.draft, RowLinear)
    assert parallel.added == {"model.draft.weight", f"model.draft.largest.{dist.get_rank()}"}
    (piece,) = parallel.specs["draft.largest"].pieces
    return piece.name, float(model.draft.largest), sorted(name for name in parallel.tensors() if "draft" in name)


def test_each_method_acts_in_its_turn() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**BASE))
    alone = ParallelModel.build(model, ParallelMesh(), Layout(transforms=(Draft(6),)), seed=3)
    weight = alone.root.draft.weight.detach()
    for rank, (name, largest, tensors) in enumerate(run(built, 2)):
        assert name == f"model.draft.largest.{rank}"
        assert largest == float(weight[:, rank * 12 :][:, :12].abs().max())
        assert tensors == ["draft.largest", "draft.weight"]


def test_a_registered_transform_is_rebuilt(registered: None) -> None:
    assert rebuild(describe([Draft(6), LoRA(2)])) == [Draft(6), LoRA(2)]


def test_a_model_is_changed_once() -> None:
    model = GPT(GPTConfig(**BASE))
    made = apply_transforms(model, [Draft(6)])
    assert made == [{"draft.weight"}]
    assert apply_transforms(model, [Draft(6)]) == made
    assert apply_transforms(model, []) == made
    with torch.device("meta"):
        model = GPT(GPTConfig(**BASE))
    parallel = ParallelModel(model, ParallelMesh(), Layout(plan=gpt_plan(model), transforms=(LoRA(2),)))
    with pytest.raises(LayoutError, match=r"was split already \(.*LoRA\(rank=2"):
        parallel.check_same(ParallelMesh(), Layout())


def test_a_model_with_values_keeps_them_and_draws_what_is_new() -> None:
    config = GPTConfig(**BASE)
    model, twin = GPT(config), GPT(config)
    initialize(model, 5)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallel = megalight.parallelize(model, megalight.Layout(transforms=(LoRA(2),)), seed=9, fill=True)
    apply_transforms(twin, [LoRA(2)])
    initialize(twin, 9, "model.")
    for (name, parameter), (_, drawn) in zip(parallel.root.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(parameter, kept.get(name, drawn)), name
    assert len(kept) < len(list(twin.named_parameters()))
