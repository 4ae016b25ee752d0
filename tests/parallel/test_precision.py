"""Products in 8 bits with scales of past steps: ranks agree on a weight's history, and experts keep their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.nn import Linear
from megalight.nn.init import initialise
from megalight.ops.parameter import precision_of
from megalight.parallel.data_parallel import DataParallel
from megalight.parallel.mesh import EXPERT_DATA_AXES, ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.options import ParallelOptions
from megalight.parallel.precision import LowPrecisionOptions, apply_low_precision
from megalight.parallel.run_engine import engine_over
from megalight.parallel.shard import ShardSpec
from megalight.parallel.step import Step
from tests.parallel.expert.model import CONFIG, build
from tests.parallel.expert.test_coupling import Task, micro_batches
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import canonical
from tests.workers import run

OPTIONS = LowPrecisionOptions("delayed", history=2, emulate=True)
WIDE = replace(CONFIG, hidden_size=64, head_dim=16, ffn_hidden_size=64)
STEPS = 3


def _experts_on_one_device(replicas: int) -> tuple[list[float], dict[str, Any]]:
    model, task = build(WIDE).double(), Task()
    initialise(model, 3, prefix="model.")
    session = apply_low_precision(model, OPTIONS, ParallelMesh())
    batches = [batch for replica in range(replicas) for batch in micro_batches(replica)]
    tokens = sum(float(task.loss_tokens(batch)) for batch in batches)
    losses = []
    for number in range(STEPS):
        model.zero_grad()
        with session.step(number):
            total = 0.0
            for batch in batches:
                loss = task.loss_step(task.forward_step(model, batch), batch)
                ((loss.sum / tokens) + loss.auxiliary["mean"] / len(batches)).backward()
                total += float(loss.sum.detach()) / tokens
        losses.append(total)
    return losses, canonical(model, {name: p.grad for name, p in model.named_parameters()})


def _experts(degrees: dict[str, int]) -> dict[str, float]:
    """Three steps of a model with experts, without an update between them."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    root = build(WIDE).double().to("meta")
    options = ParallelOptions(sequence_parallel=mesh.tp > 1)
    model = ParallelModel.build(root, mesh, options, seed=3)
    session = apply_low_precision(root, OPTIONS, mesh, specs=model.specs)
    step = Step(model, Task())
    step.engine = engine_over([model], [model.parameters()], DataParallel(level="no_shard"))
    wanted, gradients = _experts_on_one_device(mesh.dp)
    errors = {}
    for number in range(STEPS):
        step.engine.zero_grad()
        with session.step(number):
            outcome = step.train(micro_batches(mesh.rank("dp")))
        errors[f"loss {number}"] = abs(float(outcome.loss) / wanted[number] - 1)
    local = {name: p.main_grad for name, p in root.named_parameters()}
    found = gather_canonical(local, model.specs, mesh, sum_partial=False)
    return errors | {name: relative_error(found["model." + name], gradients[name]) for name in gradients}


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2, "ep": 2}])
def test_steps_with_experts_equal_one_device(degrees: dict[str, int]) -> None:
    for errors in run(_experts, 2 * degrees.get("tp", 1), degrees):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


class Layer(nn.Module):
    """A dense layer and some experts, each a linear layer of its own."""

    def __init__(self, experts: list[int]) -> None:
        super().__init__()
        self.dense = Linear(32, 32, bias=False)
        self.experts = nn.ModuleDict({str(index): Linear(32, 32, bias=False) for index in experts})


EXPERTS = {0: [0, 1], 1: [2, 3]}
"""Place along ``ep`` -> the experts there."""


def _histories(experts: list[int], ranks: list[int], mesh: ParallelMesh) -> dict[str, Tensor]:
    """Two steps over the tokens of ``ranks``, whose sizes differ; rank 2 has no tokens for expert 1."""
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": Layer(experts)})
    model.double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    stacked = ShardSpec((), (), EXPERT_DATA_AXES)
    specs = {name: stacked for name, _ in model.named_parameters() if "experts" in name}
    session = apply_low_precision(model, OPTIONS, mesh, specs=specs)
    layer = model.layers["0"]
    for number in range(2):
        with session.step(number):
            for rank in ranks:
                x = torch.full((16, 32), 2.0**rank, dtype=torch.float64)
                layer.dense(x).sum().backward()
                for index in experts:
                    if index in EXPERTS[rank % 2] and (rank, index) != (2, 1):
                        layer.experts[str(index)](x * (1 + index)).sum().backward()
    return {name: precision_of(p).history.past for name, p in model.named_parameters()}


def _apart() -> dict[str, bool]:
    rank = dist.get_rank()
    mesh = ParallelMesh(4, rank, ep=2)
    expected = _histories([0, 1, 2, 3], [0, 1, 2, 3], ParallelMesh())
    found = _histories(EXPERTS[mesh.rank("ep")], [rank], mesh)
    return {name: torch.equal(past, expected[name]) for name, past in found.items()}


def test_replicas_of_an_expert_agree_and_other_experts_keep_their_own() -> None:
    for found in run(_apart, 4):
        assert len(found) == 3
        assert all(found.values()), found
