"""The step without Lightning: its counts are those of the whole global batch, whoever holds which part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.p2p_communication import Carry
from megalight.parallel.run_engine import engine_over
from megalight.parallel.step import StepDriver
from megalight.types import Loss
from tests.support.workers import run

Rows = tuple[Tensor, Tensor]
"""``[n, 3]`` inputs and ``[n]`` weights."""


@dataclass
class Weighted:
    """A weighted sum of squares; the spread of the outputs is an auxiliary loss."""

    def forward_step(self, model: nn.Module, batch: Rows, carry: Carry | None = None) -> Carry:
        return {"y": model(batch[0])}

    def loss_step(self, carry: Carry, batch: Rows) -> Loss:
        losses = carry["y"].square().sum(-1) * batch[1]
        return Loss(losses.sum(), {"spread": carry["y"].abs().mean()})

    def loss_tokens(self, batch: Rows) -> Tensor:
        return batch[1].sum()


def micro_batches(weight: float) -> list[Rows]:
    draws = torch.Generator().manual_seed(5)
    x = torch.randn(8, 3, generator=draws, dtype=torch.float64)
    weights = torch.rand(8, generator=draws, dtype=torch.float64)
    weights *= weight / weights.sum()
    return list(zip(x.split(2), weights.split(2), strict=True))


def model_of() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64)


def expected(weight: float) -> dict[str, Any]:
    """One device, by hand."""
    model, task = model_of(), Weighted()
    losses = [task.loss_step(task.forward_step(model, batch), batch) for batch in micro_batches(weight)]
    total = torch.stack([loss.sum for loss in losses]).sum()
    spread = torch.stack([loss.aux_losses["spread"] for loss in losses]).mean()
    mean = total / weight if weight else total
    (mean + spread).backward()
    gradients = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])  # type: ignore[union-attr]
    return {"loss": mean.detach(), "spread": spread.detach(), "gradients": gradients}


def _steps(weight: float, shares: list[slice]) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    model = ParallelModel.build(model_of(), ParallelMesh(len(shares), rank))
    step = StepDriver(model, Weighted())
    step.engine = engine_over(
        [model], [model.parameters()], DataParallelOptions(level="no_shard", overlap_grad_reduce=False)
    )
    share = micro_batches(weight)[shares[rank]]
    done = step.train(share)
    total, count = step.evaluate("val", share)["loss"]
    gradients = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])  # type: ignore[union-attr]
    return {
        "loss": done.loss,
        "spread": done.metrics["spread"],
        "gradients": gradients.clone(),
        "validation": total / count if count else total,
        "tokens": float(done.num_tokens),
    }


@pytest.mark.parametrize("weight", [0.25, 3.0, 0.0])
@pytest.mark.parametrize("shares", [[slice(0, 4)], [slice(0, 1), slice(1, 4)]])
def test_counts_are_those_of_the_global_batch(weight: float, shares: list[slice]) -> None:
    """Weights that sum to less than 1 divide as any others; ranks may have different numbers of micro-batches."""
    wanted = expected(weight)
    for found in run(_steps, len(shares), weight, shares):
        assert found["tokens"] == pytest.approx(weight)
        for name in ("loss", "spread", "gradients"):
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-12, check_dtype=False)
        torch.testing.assert_close(found["validation"], found["loss"], rtol=1e-12, atol=0)
