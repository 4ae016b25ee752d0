"""Messages of experts hidden behind other work, on GPUs: gradients equal those of the plain schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.p2p_communication import Carry
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.run_engine import engine_over
from megalight.parallel.step import StepDriver
from megalight.types import Loss
from tests.parallel.expert.model import build
from tests.parallel.expert.test_coupling import Task
from tests.parallel.expert.test_overlap import BESIDE, COMBINED, DEEP, FULL, VARIANT, micro_batches
from tests.support.nccl import runs_of

pytestmark = pytest.mark.gpu
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "turns": (2, {"ep": 2}, COMBINED),
    "turns, with recompute": (2, {"ep": 2}, {**COMBINED, "recompute": FULL}),
    "turns, in a pipeline": (4, {"ep": 2, "pp": 2}, {**COMBINED, "virtual_pipeline": 2}),
    "turns, by copy engines": (2, {"ep": 2}, {**COMBINED, "expert": ExpertOptions("symmetric")}),
    "turns, in a pipeline of eight": (8, {"ep": 4, "pp": 2}, {**COMBINED, "virtual_pipeline": 2}),
    "beside": (2, {"ep": 2}, {"expert": BESIDE}),
    "beside, over four": (4, {"ep": 4}, {"expert": BESIDE}),
}


class LossAlone(Task):
    """The same task, without what it adds to the loss and the metrics."""

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        return Loss(carry["losses"].sum())


def gradients(degrees: dict[str, int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The reduced gradients of this rank after two steps: the second one uses memory again."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    root = build(DEEP, **VARIANT).to("meta")
    model = ParallelModel.build(root, mesh, Layout.on(mesh, **options), device="cuda", seed=3)
    step = StepDriver(model, LossAlone())
    step.engine = engine_over([model], [model.parameters()], DataParallelOptions(level="no_shard"))
    batches = [tuple(each.to("cuda") for each in batch) for batch in micro_batches(mesh.rank("dp"), 6)]
    for _ in range(2):
        step.engine.zero_grad()
        step.train(batches)
    return {name: p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}


def difference(name: str) -> float:
    _, degrees, options = CASES[name]
    plain = {**options, "pipeline": PipelineOptions(), "expert": ExpertOptions(), "recompute": RecomputeOptions()}
    found, wanted = gradients(degrees, options), gradients(degrees, plain)
    assert found.keys() == wanted.keys()
    worst = torch.stack([(found[n] - wanted[n]).norm() / wanted[n].norm().clamp(min=1e-6) for n in wanted]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def jobs(world: int) -> Sequence[tuple[Any, tuple[Any, ...]]]:
    return [(difference, (name,)) for name, (size, *_) in CASES.items() if size == world]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_schedule(name: str) -> None:
    assert runs_of(jobs, CASES[name][0]).outcome((name,)) < 1e-4
