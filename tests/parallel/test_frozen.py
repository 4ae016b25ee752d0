"""Results of a frozen model come back to the ranks that hold the micro-batches, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight import checkpoint
from megalight.checkpoint import views_of_parameters
from megalight.parallel.frozen_model import FrozenModel
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.p2p_communication import Carry
from tests.support.workers import run


class Doubling:
    """Doubles rows, says which are positive, and draws a number; host values travel along with the micro-batch."""

    token_multiple = 1

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 3, bias=False)

    def forward_step(self, model: nn.Module, batch: dict[str, Any], carry: Carry | None = None) -> Carry:
        x = model(batch["x"]) * batch["factor"]
        return {"x": x, "positive": x > 0, "noise": torch.rand(()), "none": x[:0]}


def _share(replica: int) -> list[dict[str, Any]]:
    """Replicas have 1, 3, ... micro-batches, each of another length."""
    draws = torch.Generator().manual_seed(replica)
    count = 2 * replica + 1
    return [{"x": torch.randn(3, place + 2, generator=draws).T, "factor": place + 2} for place in range(count)]


def _results(ours: dict[str, int], theirs: dict[str, int]) -> tuple[int, list[float]]:
    mesh = ParallelMesh(4, dist.get_rank(), **ours)
    declared = FrozenModel(task=Doubling(), seed=5, layout=Layout(**theirs))
    frozen = declared.build("teacher", mesh, torch.float32, torch.device("cpu"))
    share, before = _share(mesh.rank("dp")), torch.get_rng_state()
    for _ in range(2):  # forms are known the second time
        results = frozen(share)
    assert torch.equal(torch.get_rng_state(), before)
    weight = frozen.model.root.weight
    assert isinstance(weight, Tensor)
    for batch, result in zip(share, results, strict=True):
        expected = (batch["x"] @ weight.T) * batch["factor"]
        torch.testing.assert_close(result["x"], expected)
        assert torch.equal(result["positive"], result["x"] > 0)
        assert result["none"].shape == (0, 3)
    return mesh.rank("dp"), [float(result["noise"]) for result in results]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"tp": 2}, {}), ({"pp": 2}, {}), ({}, {"tensor_parallel": 1}), ({"tp": 4}, {})],
)
def test_results_come_back_in_order(ours: dict[str, int], theirs: dict[str, int]) -> None:
    found = run(_results, 4, ours, theirs)
    by_replica = dict(found)
    assert all(by_replica[replica] == noise for replica, noise in found), "ranks of a replica got different results"
    draws = [value for noise in by_replica.values() for value in noise]
    assert len(set(draws)) == len(draws)


def test_values_come_from_a_source_of_another_name(tmp_path: Any) -> None:
    mesh, device = ParallelMesh(), torch.device("cpu")
    saved = ParallelModel.build(nn.Linear(3, 3, bias=False), mesh)
    checkpoint.save(tmp_path / "saved", views_of_parameters(saved.tensors().items(), saved.specs, mesh))
    declared = FrozenModel(task=Doubling(), source=checkpoint.open(tmp_path / "saved"))
    frozen = declared.build("teacher", mesh, torch.float32, device)
    assert torch.equal(frozen.model.root.weight, saved.root.weight)  # type: ignore[arg-type]
    assert [piece.name for spec in frozen.model.specs.values() for piece in spec.pieces] == ["teacher.weight"]
