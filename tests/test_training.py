"""Training in a plain torch loop; whole runs on any layout are in tests/examples/test_plain_loop.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import megalight
from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.gpt import GPT
from megalight.parallel import model as parallel_model
from megalight.parallel import run_engine
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.initial_values import initialize
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column
from megalight.parallel.transform import ModelTransform
from megalight.types import Loss
from tests.parallel.test_step import Weighted, micro_batches
from tests.strategies.training import BASE, WithData, global_batch
from tests.support.workers import run


def _training(seed: int = 0, layout: megalight.Layout | None = None, **options: Any) -> megalight.Training:
    torch.manual_seed(seed)
    model = megalight.parallelize(nn.Linear(3, 2, dtype=torch.float64), layout)
    return megalight.Training(model, torch.optim.SGD(model.parameters(), lr=0.1), Weighted(), **options)


def _weights(training: megalight.Training) -> list[float]:
    training.sync_parameters()
    return torch.cat([parameter.detach().reshape(-1) for parameter in training.model.parameters()]).tolist()


def _two_steps(how: str) -> list[float]:
    """Two steps over two replicas; the second one's gradients are of two halves of a batch in one of the ways."""
    rank, overlap = dist.get_rank(), how == "overlap"
    sharing = DataParallelOptions(overlap_param_gather=True) if overlap else None
    training = _training(seed=rank, layout=megalight.Layout(data_parallel=sharing))
    share = micro_batches(3.0)[2 * rank : 2 * rank + 2]
    for step in range(2):
        if how == "accumulate" and step:
            training.forward_backward(share, scale=0.5, sync=False)
            training.forward_backward(share, scale=0.5)
        else:
            training.forward_backward(share)
        training.clip_grad_norm(0.1)
        training.optimizer.step()
    return _weights(training)


def test_replicas_begin_alike_and_gradients_are_added_up() -> None:
    """Ranks have drawn different models: all go on with that of rank 0."""
    found = {how: run(_two_steps, 2, how) for how in ("usual", "accumulate", "overlap")}
    for how, (first, second) in found.items():
        assert first == second, how
        np.testing.assert_allclose(first, found["usual"][0], rtol=1e-12)


def _normed(broadcast: bool) -> list[float]:
    model = megalight.parallelize(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = megalight.Training(model, optimizer, Weighted(), broadcast_buffers=broadcast)
    training.forward_backward(micro_batches(3.0)[2 * dist.get_rank() :][:2])
    optimizer.step()
    found: list[float] = model.root[0].running_mean.tolist()  # type: ignore[index, union-attr, operator]
    return found


def test_buffers_are_those_of_the_first_replica() -> None:
    first, second = run(_normed, 2, False)
    assert first != second
    assert run(_normed, 2, True) == [first, first]


def test_evaluation_is_the_loss_of_training() -> None:
    training = _training()
    with torch.no_grad():
        expected = training.evaluate(micro_batches(3.0))
    assert not training.model.eval().root.training
    assert training.model.train().root.training
    torch.testing.assert_close(training.forward_backward(micro_batches(3.0)).loss, expected["loss"])


def test_half_precision_keeps_masters_of_the_draws() -> None:
    with torch.device("meta"):
        net = nn.Linear(3, 2)
    model = megalight.parallelize(net, dtype=torch.bfloat16, seed=3)
    training = megalight.Training(model, torch.optim.SGD(model.parameters(), lr=0.1), Weighted())
    (master,) = [shard.master for shard in training.engine.shards]
    rounded = training.engine.buckets[0].own_params
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), rounded)
    assert not torch.equal(master, rounded.float())


def test_values_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = []

    def counted(*args: Any, **options: Any) -> None:
        draws.append(options)
        initialize(*args, **options)

    for place in (run_engine, parallel_model):
        monkeypatch.setattr(place, "initialize", counted)
    with torch.device("meta"):
        net = nn.Linear(3, 2)
    model = megalight.parallelize(net, dtype=torch.bfloat16, seed=3)
    with pytest.raises(ConfigurationError, match=r"Linear has no values yet\. Make a megalight\.Training"):
        net(torch.ones(1, 3))
    megalight.Training(model, torch.optim.SGD(model.parameters(), lr=0.1), Weighted())
    assert len(draws) == 1
    assert net(torch.ones(1, 3, dtype=torch.bfloat16)).isfinite().all()

    with torch.device("meta"):
        other = nn.Linear(3, 2)
    megalight.parallelize(other, dtype=torch.bfloat16, seed=3, fill=True)
    assert torch.equal(other.weight, net.weight)


class Doubling(ModelTransform):
    """Doubles all values."""

    def change(self, model: nn.Module) -> None:
        """The structure stays."""

    def with_values(self, model: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)


@pytest.mark.parametrize("fill", [False, True])
def test_transforms_change_values_once(fill: bool) -> None:
    plain, doubled = nn.Linear(3, 2), nn.Linear(3, 2)
    doubled.load_state_dict(plain.state_dict())
    model = megalight.parallelize(doubled, megalight.Layout(transforms=(Doubling(),)), dtype=torch.bfloat16, fill=fill)
    for _ in range(2):
        training = megalight.Training(model, torch.optim.SGD(model.parameters(), lr=0.1), Weighted())
        assert torch.equal(doubled.weight, 2 * plain.weight.bfloat16())
    (master,) = [shard.master for shard in training.engine.shards]
    assert torch.equal(master, training.engine.buckets[0].own_params.float())


def _adam(tensor_parallel: int) -> megalight.Training:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64))
    plan = ParallelizePlan({"0": Column(gather_output=True)})
    model = megalight.parallelize(net, megalight.Layout(plan=plan, tensor_parallel=tensor_parallel))
    return megalight.Training(model, torch.optim.AdamW(model.parameters(), lr=0.1), Weighted())


def _train(training: megalight.Training, steps: range) -> None:
    mesh = training.model.mesh
    for step in steps:
        training.forward_backward(micro_batches(1.0 + step)[mesh.rank("dp") :: mesh.dp])
        training.optimizer.step()


def _resumed(path: str) -> None:
    """Two steps under tensor parallelism, a third one under data parallelism."""
    first = _adam(2)
    _train(first, range(2))
    first.save(path, step=2)
    _train(first, range(2, 3))
    second = _adam(1)
    second.optimizer.param_groups[0]["lr"] = 0.7
    values = second.load(path)
    assert values == {"step": 2}
    assert second.optimizer.param_groups[0]["lr"] == 0.1
    _train(second, range(values["step"], 3))
    whole = dict(second.model.root.named_parameters())
    for name, tensor in first.model.root.named_parameters():
        for piece in first.model.specs[name].pieces:
            torch.testing.assert_close(piece.view(tensor), whole[name][piece.box], rtol=1e-9, atol=1e-12)


def test_another_layout_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    run(_resumed, 2, str(tmp_path / "saved"))


class Alone:
    """A batch that cannot be cut."""


def _whole_batches() -> None:
    model = megalight.parallelize(GPT(BASE), megalight.Layout(context_parallel=2))
    training = megalight.Training(model, torch.optim.SGD(model.parameters(), lr=0.1), Weighted())
    with pytest.raises(ConfigurationError, match=r"of type Alone cannot be cut for context parallelism \(cp=2\)"):
        training.forward_backward([Alone()])


class Boxed(WithData):
    """A task whose batches, which cannot be cut, it cuts itself."""

    def context_share(self, batch: Any, rank: int, size: int) -> Any:
        return {"rows": super().context_share(batch["rows"], rank, size)}

    def forward_step(self, model: nn.Module, batch: Any, carry: Any = None) -> Any:
        return super().forward_step(model, batch["rows"], carry)

    def loss_step(self, carry: Any, batch: Any) -> Loss:
        return super().loss_step(carry, batch["rows"])

    def loss_tokens(self, batch: Any) -> torch.Tensor:
        return super().loss_tokens(batch["rows"])

    def aux_loss_counts(self, batch: Any) -> dict[str, torch.Tensor]:
        return super().aux_loss_counts(batch["rows"])


def _by_a_module(layout: dict[str, Any]) -> list[float]:
    with torch.device("meta"):
        root = GPT(BASE)
    model = megalight.parallelize(root, megalight.Layout(**layout), dtype=torch.float64)
    training = megalight.Training(model, torch.optim.SGD(model.parameters(), lr=0.1), Boxed(BASE))
    outcome = training.forward_backward([{"rows": rows} for rows in global_batch(0, length=5).split(1)])
    return [float(outcome.loss), float(outcome.num_tokens), float(training.clip_grad_norm(1.0))]


def test_a_module_is_a_task_that_cuts_and_pads_batches() -> None:
    (expected,) = run(_by_a_module, 1, {})
    for layout in ({"context_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}):
        for found in run(_by_a_module, 2, layout):
            assert found == pytest.approx(expected, rel=1e-9)


def _other_batches() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4))
    plan = ParallelizePlan({"0": Column(gather_output=True)})
    model = megalight.parallelize(net, megalight.Layout(plan=plan, tensor_parallel=2))
    training = megalight.Training(model, torch.optim.SGD(model.parameters(), lr=0.1), Weighted())
    with pytest.raises(DataError, match="hold one model together"):
        training.forward_backward([(torch.full((2, 4), float(dist.get_rank())), torch.ones(2))])


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"sequence_parallel=True needs tensor_parallel > 1"):
        megalight.parallelize(nn.Linear(2, 2), megalight.Layout(sequence_parallel=True))
    with pytest.raises(LayoutError, match=r"world size 1 is not a multiple of"):
        megalight.parallelize(nn.Linear(2, 2), megalight.Layout(tensor_parallel=2))
    run(_whole_batches, 2)
    run(_other_batches, 2)


def test_unknown_names_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        megalight.paralelize  # noqa: B018
