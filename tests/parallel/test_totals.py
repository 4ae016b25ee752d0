"""Sums over micro-batches, stages and replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.step import GlobalTotals
from tests.support.workers import run


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _of_two_stages() -> Any:
    rank = dist.get_rank()
    totals = GlobalTotals(ParallelMesh(2, rank, pp=2), torch.device("cpu"))
    rows = [{"loss": (number(3), number(2))}, {"loss": (number(5), number(4))}] if rank else []
    ours = {"here": number(1)} if rank else {"there": number(10), "here": number(2)}
    found = totals.of("train", rows, ours, number(8))
    with pytest.raises(ConfigurationError, match=r"attached the losses \['here', 'late'.*\['here', 'there'\]"):
        totals.of("train", rows, {**ours, "late": number(1)}, number(8))
    later = totals.of("train", rows, {}, number(8))
    return [{name: (float(a), float(b)) for name, (a, b) in each.items()} for each in (found, later)]


def test_aux_losses_of_any_stage_are_among_the_totals() -> None:
    expected = {"loss": (8, 6), "there": (10, 8), "here": (3, 8)}
    assert run(_of_two_stages, 2) == [[expected, {"loss": (8, 6), "there": (0, 8), "here": (0, 8)}]] * 2


def test_a_metric_is_told_before_an_auxiliary_loss_of_its_name() -> None:
    totals = GlobalTotals(ParallelMesh(), torch.device("cpu"))
    rows = [{"loss": (number(3), number(2)), "error": (number(1), number(4))}]
    assert totals.of("train", rows, {"error": number(7)}, number(8)) == totals.of("train", rows)
