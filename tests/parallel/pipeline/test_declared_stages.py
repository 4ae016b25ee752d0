"""Models of ``transformers`` cut into stages by what they declare: loss and gradients are those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.parallel.layout import Layout
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.layout import Stage
from megalight.parallel.pipeline.stages import HIDDEN, DeclaredStage, declared_parts
from megalight.parallel.step import StepDriver
from megalight.strategies.user_module import UserStages, WeightedBatch
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


FAMILIES = ["gemma2", "gpt_neox", "gpt_oss", "gemma4_text", "nanochat", "bamba", "glm_moe_dsa"]
"""They differ in masks by layer, what follows the embedding, names of parts, sinks, inputs of each layer, and in what
they declare: the last one its head alone."""


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


@pytest.mark.parametrize("string", ["E|ttL", "Ett|L", "E|t|t|L", "Et||t|L"])
@pytest.mark.full
def test_stages_without_layers_or_ends(string: str) -> None:
    check(["gemma2"], 2, pipeline_parallel=2, virtual_pipeline=string.count("|") // 2 + 1, pipeline_layout=string)


def test_stages_of_tensor_parallel_layers() -> None:
    check(["qwen3"], 4, pipeline_parallel=2, tensor_parallel=2)


def test_parts_are_where_they_are_declared() -> None:
    parts = declared_parts(nn.ModuleDict({"net": tiny("llama")}))
    assert parts is not None
    assert (parts.layers, parts.count) == ("net.model.layers", 2)
    assert parts.first == ("net.model.embed_tokens",)
    assert set(parts.last) == {"net.model.norm", "net.lm_head"}
    # It declares its head alone.
    head = declared_parts(tiny("olmoe"))
    assert head is not None
    assert (head.layers, head.first) == ("model.layers", ("model.embed_tokens",))
    assert set(head.last) == {"model.norm", "lm_head"}
    # Its layers read what it makes of the embedding, so all stages hold it.
    every = declared_parts(tiny("gemma4_text"))
    assert every is not None
    assert every.first == ()


class Steps(nn.Module):
    """The last of two stages, which runs a step in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny("llama")
        parts = declared_parts(self)
        assert parts is not None
        self.stage = [DeclaredStage(self, parts, Stage(1, 1, 0, embed=False, layers=(1,), head=True), 1)]
        self.ids = torch.randint(3, 96, (2, 8))

    def run(self, step: Callable[[Steps], object]) -> None:
        """Run a step on the stage."""
        with self.stage[0].entered({HIDDEN: torch.randn(2, 8, 32, dtype=torch.float64)}):
            step(self)


REFUSED: dict[str, tuple[Callable[[Steps], object], type[Exception], str]] = {
    "two calls": (
        lambda it: (it.net(it.ids), it.net(it.ids)), ConfigurationError, "calls net more than once.*forward_step",
    ),
    "no call": (lambda it: None, ConfigurationError, "net was not called in a step on stage 1"),
    "all weights": (
        lambda it: (it.net(it.ids), sum(each.sum() for each in it.parameters())), ConfigurationError,
        "reads all parameters of Steps, and stage 1 .layers 1 to 1, head. has some",
    ),
    "weights of the model": (
        lambda it: list(it.net.parameters()), ConfigurationError, "reads all parameters of LlamaForCausalLM",
    ),
    "the embedding's weight": (
        lambda it: it.net.get_input_embeddings().weight, AttributeError, "net.model.embed_tokens has no weight here",
    ),
    "hidden states of all layers": (
        lambda it: it.net(it.ids, output_hidden_states=True), ConfigurationError, "runs with output_hidden_states=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_stages_cannot_run_is_refused(case: str) -> None:
    step, kind, message = REFUSED[case]
    steps = Steps()
    with pytest.raises(kind, match=message):
        steps.run(step)
    # As before: names are those of the model, which can be read again.
    assert len(list(steps.parameters())) == len(list(tiny("llama").parameters()))


def test_a_step_may_ask_for_dtype_and_device() -> None:
    seen: list[Any] = []
    Steps().run(lambda it: seen.extend([it.net(it.ids).logits.shape, it.net.dtype, it.net.device]))
    assert seen == [(2, 8, 96), torch.float64, torch.device("cpu")]


def test_two_models_are_refused() -> None:
    both = nn.ModuleDict({"one": tiny("llama"), "two": tiny("qwen2")})
    with pytest.raises(LayoutError, match="several models that a pipeline could cut: one and two"):
        declared_parts(both)
