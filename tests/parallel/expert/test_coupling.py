"""Data-parallel ranks with experts run equally many micro-batches, some of them empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.nn.init import initialize
from megalight.parallel.coupling import Coupling
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.p2p_communication import Carry
from megalight.parallel.run_engine import engine_over
from megalight.parallel.step import StepDriver
from megalight.types import Loss, PackedSequences
from megalight.types.batch import Empty
from tests.parallel.expert.model import build
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import canonical
from tests.support.workers import run


@dataclass
class Task:
    """Next tokens; an auxiliary loss and a metric that every micro-batch brings."""

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        ids, labels, sequences = batch
        output = model(ids, sequences, labels, hidden=None if carry is None else carry["hidden"])
        return {"hidden": output.hidden} if output.losses is None else {"losses": output.losses}

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        losses = carry["losses"]
        most = losses.detach().square().sum(), torch.tensor(float(len(losses)))
        return Loss(losses.sum(), {"mean": losses.mean()}, {"squares": most})

    def loss_tokens(self, batch: Any) -> Tensor:
        return torch.tensor(float(len(batch[0])))

    def context_share(self, batch: Any, rank: int, size: int) -> Any:
        """Return a share of sequences whose lengths need no padding."""
        ids, labels, sequences = batch
        share, places = sequences.zigzag(rank, size)
        return ids[places], labels[places], share


def micro_batch(lengths: list[int], draws: torch.Generator) -> Any:
    """Return tokens, labels and sequences."""
    return (*torch.randint(0, 101, (2, sum(lengths)), generator=draws), PackedSequences.of_lengths(lengths))


SHARES = [[[4, 4], [8]], [[2, 2, 4]], [[8], [4, 4], [6, 2]], [[3, 5]]]
"""Lengths of the sequences of each micro-batch, by data-parallel rank."""


def micro_batches(replica: int) -> list[Any]:
    draws = torch.Generator().manual_seed(replica)
    return [micro_batch(lengths, draws) for lengths in SHARES[replica]]


def expected(replicas: int) -> dict[str, Any]:
    """One device, by hand."""
    model, task = build().double(), Task()
    initialize(model, 3, prefix="model.")
    every = [batch for replica in range(replicas) for batch in micro_batches(replica)]
    losses = [task.loss_step(task.forward_step(model, batch), batch) for batch in every]
    tokens = sum(float(task.loss_tokens(batch)) for batch in every)
    loss = torch.stack([loss.sum for loss in losses]).sum() / tokens
    mean = torch.stack([loss.aux_losses["mean"] for loss in losses]).mean()
    (loss + mean).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    squares = torch.stack([loss.metrics["squares"][0] for loss in losses]).sum() / tokens
    gradients = canonical(model, {name: p.grad for name, p in model.named_parameters()})
    return {"loss": loss, "mean": mean, "squares": squares, "norm": norm, "gradients": gradients}


def _step(degrees: dict[str, int]) -> dict[str, float]:
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    root = build().double().to("meta")
    options = Layout.on(mesh, sequence_parallel=mesh.tp > 1)
    model = ParallelModel.build(root, mesh, options, seed=3)
    assert (model.coupling is not None) == (mesh.dp > 1)
    step = StepDriver(model, Task())
    step.engine = engine_over([model], [model.parameters()], DataParallelOptions(level="no_shard"))
    share = micro_batches(mesh.rank("dp"))
    wanted = expected(mesh.dp)
    errors = {}
    for _ in range(2):  # the second step reduces buckets while its last micro-batch runs
        step.engine.zero_grad()
        done = step.train(share)
        totals = step.evaluate("val", share)
        errors["val_loss"] = relative_error(totals["loss"][0] / totals["loss"][1], wanted["loss"])
        assert len(step.outputs(share)) in (0, len(share))
        for name, value in {"loss": done.loss, **done.metrics, "norm": step.engine.grad_norm()}.items():
            errors[name] = relative_error(value, wanted[name])
        gradients = {name: p.grad for name, p in model.root.named_parameters()}
        found = gather_canonical(gradients, model.specs, mesh, sum_partial=False)
        errors |= {name[6:]: relative_error(value, wanted["gradients"][name[6:]]) for name, value in found.items()}
    return errors


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        pytest.param(2, {"ep": 2}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 2}, marks=pytest.mark.full),
        (4, {"pp": 2, "ep": 2}),
        (4, {"tp": 2, "ep": 4}),
    ],
)
def test_unequal_numbers_of_micro_batches(ranks: int, degrees: dict[str, int]) -> None:
    for errors in run(_step, ranks, degrees):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong
        assert {"loss", "mean", "squares", "norm", "val_loss"} < errors.keys()


def _filled(counts: list[int]) -> list[Any]:
    mesh = ParallelMesh(len(counts), dist.get_rank())
    coupling = Coupling(mesh)
    return coupling.fill_up([f"batch {i}" for i in range(counts[dist.get_rank()])])


def test_the_last_micro_batch_is_repeated() -> None:
    found = run(_filled, 2, [1, 3])
    assert found == [["batch 0", Empty("batch 0"), Empty("batch 0")], ["batch 0", "batch 1", "batch 2"]]


def test_ranks_that_share_tokens_are_not_coupled() -> None:
    with torch.device("meta"):
        root = build()
    mesh = ParallelMesh(4, 0, tp=2, ep=2)  # the experts of a rank lie on its tp neighbor: both run the same batches
    assert ParallelModel(root, mesh, Layout.on(mesh, sequence_parallel=True)).coupling is None
