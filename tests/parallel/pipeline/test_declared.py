"""Models of ``transformers`` cut into stages by what they declare: loss and gradients are those of the plain model."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.parallel.layout import Layout
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.declared import declared_parts
from megalight.parallel.step import StepDriver
from megalight.strategies.user_stages import UserStages, WeightedBatch
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.tiny_transformers import tiny
from tests.support.workers import run


class Holder(pl.LightningModule):
    """A module with a model of a family."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.net = tiny(family)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(loss.detach())
        return loss


def errors_of(family: str, **layout: Any) -> dict[str, float]:
    """How far loss and gradients of a pipelined model are from those of the plain one, on every rank."""
    options = Layout(**layout)
    mesh = options.mesh(dist.get_world_size(), dist.get_rank())
    module = Holder(family)
    whole = copy.deepcopy(module)
    model = ParallelModel.build(module, mesh, options)
    task = UserStages(module, torch.device("cpu"), AssertionError)
    driver = StepDriver(model, task)
    ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
    batches = [WeightedBatch(part, 0.5) for part in ids.split(2)]
    task.begin("training_step", [0])
    driver.probe(batches)
    torch.stack([whole.training_step(part, 0) / 2 for part in ids.split(2)]).sum().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}
    found = gather_canonical(grads, model.specs, mesh)
    theirs = {f"model.{n}": p.grad for n, p in whole.named_parameters() if p.grad is not None}
    errors = {name: relative_error(found[name], grad) if name in found else 1.0 for name, grad in theirs.items()}
    # The code behind the model runs on the last stage alone.
    pairs = zip(module.losses, whole.losses, strict=mesh.rank("pp") == mesh.pp - 1)
    return {**errors, **{f"loss {place}": relative_error(*pair) for place, pair in enumerate(pairs)}}


FAMILIES = ["llama", "gemma2", "gpt_neox", "gpt_oss", "gemma4_text"]
"""They differ in masks by layer, what follows the embedding, names of parts, sinks, and inputs of each layer."""


def _errors(families: list[str], layout: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {family: errors_of(family, **layout) for family in families}


def check(families: list[str], ranks: int, **layout: Any) -> None:
    for found in run(_errors, ranks, families, layout, timeout=600):
        for family, errors in found.items():
            # Its norms compute in float32, and gradients of the embedding add up in another order.
            tolerance = 1e-6 if family.startswith("gemma4") else 1e-9
            wrong = {name: error for name, error in errors.items() if not error <= tolerance}
            assert not wrong, f"{family}: {wrong}"


def test_stages_compute_what_the_model_does() -> None:
    check(FAMILIES, 2, pipeline_parallel=2)


@pytest.mark.parametrize("string", ["E|ttL", "Ett|L", "E|t|t|L"])
def test_stages_without_layers_or_ends(string: str) -> None:
    check(["gemma2"], 2, pipeline_parallel=2, virtual_pipeline=string.count("|") // 2 + 1, pipeline_layout=string)


def test_stages_of_tensor_parallel_layers() -> None:
    check(["qwen3", "gemma2"], 4, pipeline_parallel=2, tensor_parallel=2)


def test_parts_are_where_they_are_declared() -> None:
    parts = declared_parts(nn.ModuleDict({"net": tiny("llama")}))
    assert parts is not None
    assert (parts.layers, parts.count) == ("net.model.layers", 2)
    assert parts.first == ("net.model.embed_tokens",)
    assert set(parts.last) == {"net.model.norm", "net.lm_head"}
    # Its layers read what it makes of the embedding, so all stages hold it.
    every = declared_parts(tiny("gemma4_text"))
    assert every is not None
    assert every.first == ()


def test_two_models_are_refused() -> None:
    both = nn.ModuleDict({"one": tiny("llama"), "two": tiny("qwen2")})
    with pytest.raises(LayoutError, match="several models that a pipeline could cut: one and two"):
        declared_parts(both)
