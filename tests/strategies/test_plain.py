"""A plain LightningModule trains as the same code by hand does, on any number of replicas."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, Row
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy
from tests.parallel.gathering import gather_canonical
from tests.strategies.regression import Plain, Turns, batches, by_hand, dealt, fit, samples, strategy, weights
from tests.support.environment import trainer
from tests.support.options import data_parallel
from tests.support.workers import run


def close(found: list[list[float]], expected: list[list[float]], tolerance: float = 1e-9) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        a, b = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
        assert (a - b).norm() <= tolerance * b.norm()


def _trained(optimizer: str, level: str, micro: int | None, size: int, accumulate: int) -> list[list[float]]:
    module = Plain(optimizer)
    fit(module, batches(24, size), strategy(level, micro_batch_size=micro), accumulate_grad_batches=accumulate)
    return weights(module)


@pytest.mark.parametrize(
    ("ranks", "level", "optimizer", "micro"),
    [(1, "optim", "AdamW", None), (1, "no_shard", "SGD", 2), (2, "optim", "SGD", None), (2, "optim", "AdamW", 2)],
)
def test_trains_as_by_hand(ranks: int, level: str, optimizer: str, micro: int | None) -> None:
    size = 6 // ranks
    found = run(_trained, ranks, optimizer, level, micro, size, 1)
    for rank in found:
        close(rank, by_hand(Plain(optimizer), dealt(24, size, ranks)))


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_gradients_are_the_mean_of_the_windows_batches(accumulate: int) -> None:
    batches = dealt(24, 2, 2)
    windows = [list(chain(*batches[i : i + accumulate])) for i in range(0, len(batches), accumulate)]
    for rank in run(_trained, 2, "AdamW", "optim", 1, 2, accumulate):
        close(rank, by_hand(Plain("AdamW"), windows))


class Seeded(Plain):
    """Ranks that draw different weights; metrics of all kinds."""

    def __init__(self, rank: int) -> None:
        super().__init__("SGD", seed=rank)
        self.error = MeanSquaredError()
        self.seen: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        self.seen.append(x.detach().clone())
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train", loss, sync_dist=True)
        self.log("index", float(self.trainer.global_rank), sync_dist=True, reduce_fx="sum")
        return {"loss": loss, "extra": loss.detach()}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.error.update(self(x), y)
        self.log("error", self.error)


def _seeded() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    module = Seeded(rank)
    runner = trainer(strategy(), max_steps=-1, max_epochs=2)
    runner.fit(module, batches(12, 3, shuffle=True), batches(8, 2, seed=1))
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    return {"weights": weights(module), "metrics": metrics, "seen": torch.cat(module.seen).tolist()}


def test_ranks_end_equal_with_right_metrics() -> None:
    first, second = run(_seeded, 2)
    assert first["weights"] == second["weights"]
    assert first["metrics"] == second["metrics"]
    x, y = samples(8, 1)
    module = Plain().double()
    for parameter, values in zip(module.parameters(), first["weights"], strict=True):
        parameter.data.copy_(torch.tensor(values, dtype=torch.float64).view_as(parameter))
    loss = float(nn.functional.mse_loss(module(x), y).detach())
    assert first["metrics"]["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert first["metrics"]["error"] == pytest.approx(loss, rel=1e-6)
    assert first["metrics"]["index"] == 1.0  # 0 + 1
    halves = [{tuple(row) for row in rank["seen"][:6]} for rank in (first, second)]
    assert halves[0].isdisjoint(halves[1])
    assert halves[0] | halves[1] == {tuple(row) for row in samples(12)[0].tolist()}


class Wide(Plain):
    """Two tensor-parallel ranks can divide it; each draws weights of its own at first, but for rank 0's seed."""

    def __init__(self, seed: int) -> None:
        super().__init__("AdamW", seed)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 2))
        self.seen: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0].detach().clone())
        self.log("mean", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)
        return super().training_step(batch, batch_idx)


def _split() -> dict[str, Any]:
    how = strategy(tensor_parallel=2, plan=ParallelizePlan({"net.0": Column(), "net.3": Row()}), micro_batch_size=1)
    module = Wide(torch.distributed.get_rank())
    runner = fit(module, batches(16, 2, shuffle=True), how)
    specs, values = how.parallel_model.specs, {name: p.detach() for name, p in module.named_parameters()}
    whole = gather_canonical(values, specs, how.mesh, sum_partial=False)
    return {
        "seen": torch.cat(module.seen).tolist(),
        "weights": [whole[spec.pieces[0].name].reshape(-1).tolist() for spec in specs.values()],
        "mean": float(runner.callback_metrics["mean"]),
    }


def test_a_plan_splits_a_plain_module() -> None:
    found = run(_split, 4)  # tp2 x dp2
    assert found[0]["seen"] == found[1]["seen"] != found[2]["seen"] == found[3]["seen"]
    assert len({rank["mean"] for rank in found}) == 1
    expected = by_hand(Wide(0), dealt(16, 2, 2))
    for rank in found:
        close(rank["weights"], expected)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__("SGD")
        self.net[0].requires_grad_(False)


def _frozen() -> tuple[list[list[float]], list[list[float]]]:
    module = Frozen()
    before = weights(module.double())
    fit(module, batches(8, 2))
    return before, weights(module)


def test_frozen_parameters_stay() -> None:
    for before, after in run(_frozen, 2):
        assert after[:2] == before[:2]
        assert after[2:] != before[2:]


class Half(Plain):
    """Notices what types its layers work in."""

    types: tuple[torch.dtype, ...] = ()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x)
        self.types = (x.dtype, self.net[0].weight.dtype, output.dtype, torch.zeros(()).dtype)
        return nn.functional.mse_loss(output, y.to(output.dtype))


def _types(precision: str) -> tuple[str, ...]:
    module = Half("SGD")
    before = weights(module)
    fit(module, batches(8, 4), precision=precision)
    assert weights(module) != before
    return tuple(str(dtype).removeprefix("torch.") for dtype in module.types)


def test_precision_is_what_lightning_users_know() -> None:
    assert run(_types, 1, "bf16-true")[0] == ("bfloat16",) * 4
    assert run(_types, 1, "64-true")[0] == ("float64",) * 4


class Floats(Half):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step((batch[0].float(), batch[1].float()), batch_idx)


def _autocast() -> tuple[str, ...]:
    module = Floats("SGD")
    fit(module, batches(8, 4), precision="bf16-mixed")
    return tuple(str(dtype).removeprefix("torch.") for dtype in module.types)


def test_mixed_precision_is_autocast_over_float32_weights() -> None:
    assert run(_autocast, 1)[0] == ("float32", "float32", "bfloat16", "float32")


class Backward(Plain):
    """Overrides hooks around the backward."""

    def __init__(self) -> None:
        super().__init__("SGD")
        self.calls: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().training_step(batch, 0)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        super().backward(loss)

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("zero")
        super().optimizer_zero_grad(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("step")
        super().optimizer_step(*args, **kwargs)


def _overridden() -> tuple[list[str], list[list[float]]]:
    module = Backward()
    fit(module, batches(8, 4), strategy(micro_batch_size=2))
    return module.calls, weights(module)


def test_overridden_steps_of_optimization_are_called() -> None:
    calls, found = run(_overridden, 1)[0]
    assert calls == ["step", "zero", "backward", "backward"] * 2
    close(found, by_hand(Plain("SGD"), dealt(8, 4, 1)))


def _clipped(algorithm: str) -> list[list[float]]:
    module = Plain("SGD")
    fit(module, batches(16, 4), gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
    return weights(module)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm: str) -> None:
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]
    module = Plain("SGD").double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in dealt(16, 4, 2):
        optimizer.zero_grad()
        sum(nn.functional.mse_loss(module(x), y) / 2 for x, y in step).backward()  # type: ignore[union-attr]
        clip(module.parameters(), 0.05)
        optimizer.step()
    for rank in run(_clipped, 2, algorithm):
        close(rank, weights(module))


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__("SGD")
        self.net[1] = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.trainer.global_rank)  # ranks see different distributions


def _normed(how: Any, folder: str, options: dict[str, Any]) -> tuple[float, float, list[float]]:
    """The best value that the run monitored, that of its checkpoint, and the buffers."""
    module = Normed()
    kept = ModelCheckpoint(folder, monitor="val_loss")
    defaults: dict[str, Any] = {"max_epochs": 2, "max_steps": -1, "enable_checkpointing": True, "callbacks": [kept]}
    runner = trainer(how(), **{**defaults, **options})
    runner.fit(module, batches(16, 2), batches(8, 2))
    assert kept.best_model_score is not None
    buffers = [value for buffer in module.buffers() for value in buffer.double().reshape(-1).tolist()]
    (found,) = runner.validate(module, batches(8, 2), ckpt_path="best", verbose=False)
    return float(kept.best_model_score), found["val_loss"], buffers


OPTIONS: list[dict[str, Any]] = [
    {},
    pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.full),
    {"val_check_interval": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["", "accumulates", "within-an-epoch"])
def test_buffers_are_those_of_the_first_rank_as_under_ddp(options: dict[str, Any], tmp_path: Path) -> None:
    (monitored, found, buffers), _ = run(_normed, 2, DDPStrategy, str(tmp_path / "ddp"), options)
    close([[found]], [[monitored]])
    for name, how in {"one": strategy, "fsdp": MegatronFSDPStrategy}.items():
        for rank in run(_normed, 2, how, str(tmp_path / name), options):
            close([rank[:2], rank[2]], [[monitored] * 2, buffers])


class NormedByHand(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()  # type: ignore[union-attr]
        self.optimizers().zero_grad()  # type: ignore[union-attr]


def _drifted(kind: type[Normed], broadcast: bool) -> list[float]:
    module = kind()
    fit(module, batches(16, 2), strategy("no_shard", broadcast_buffers=broadcast))
    return module.net[1].running_mean.tolist()


@pytest.mark.parametrize("kind", [Normed, NormedByHand])
def test_buffers_drift_only_where_asked(kind: type[Normed]) -> None:
    one, other = run(_drifted, 2, kind, False)
    assert one != other
    assert run(_drifted, 2, kind, True) == [one, one]


def _synced(how: Any) -> tuple[str, bool]:
    module = Normed()
    trainer(how(), sync_batchnorm=True).validate(module, batches(8, 2), verbose=False)
    return type(module.net[1]).__name__, getattr(module.net[1], "process_group", None) is None


@pytest.mark.parametrize("how", [strategy, MegatronFSDPStrategy])
def test_batch_norms_are_synced_where_asked(how: Any) -> None:
    assert run(_synced, 2, how) == [("SyncBatchNorm", True)] * 2


class SplitNormed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2), nn.BatchNorm1d(2))


def _synced_beside_a_split() -> tuple[str, list[int]]:
    module, how = SplitNormed(), strategy(tensor_parallel=2, plan=ParallelizePlan({"net.0": Column(), "net.2": Row()}))
    trainer(how, sync_batchnorm=True).validate(module, batches(8, 2), verbose=False)
    group = getattr(module.net[3], "process_group", None)
    return type(module.net[3]).__name__, [] if group is None else torch.distributed.get_process_group_ranks(group)


def test_batch_norms_are_synced_over_ranks_with_other_samples_alone() -> None:
    assert run(_synced_beside_a_split, 2) == [("BatchNorm1d", [])] * 2
    found = run(_synced_beside_a_split, 4)
    assert found == [("SyncBatchNorm", ranks) for ranks in ([0, 2], [1, 3], [0, 2], [1, 3])]


class Loaders(Plain):
    """Several loaders, without a batch index in sight."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.log("part", float(dataloader_idx), sync_dist=True)


def _evaluated() -> tuple[dict[str, float], int, list[list[float]], list[list[float]]]:
    module = Loaders()
    runner = trainer(strategy())
    runner.validate(module, [batches(4, 2), batches(6, 2)], verbose=False)
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    predicted = runner.predict(module, batches(5, 2))
    assert predicted is not None
    rows = torch.cat(predicted)  # type: ignore[arg-type]
    whole = module.double()(samples(5)[0])[runner.global_rank :: 2].detach()
    return metrics, len(rows), rows.tolist(), whole.tolist()


def test_several_loaders_and_predictions_of_each_rank() -> None:
    for rank, (metrics, count, predicted, expected) in enumerate(run(_evaluated, 2)):
        assert metrics == {"part/dataloader_idx_0": 0.0, "part/dataloader_idx_1": 1.0}
        assert count == (3, 2)[rank]  # nothing is predicted twice
        close(predicted, expected)


def _uneven() -> list[list[float]]:
    module = Plain("SGD")
    fit(module, batches(7, 7), strategy(micro_batch_size=3))
    return weights(module)


def test_a_smaller_last_micro_batch_weighs_less() -> None:
    close(run(_uneven, 1)[0], by_hand(Plain("SGD"), dealt(7, 7, 1)))


def _twice() -> tuple[list[list[float]], list[list[float]]]:
    module = Plain("SGD")
    runner = fit(module, batches(8, 4))
    runner.fit_loop.max_epochs = 2
    runner.fit(module, batches(8, 4))
    other = Plain("SGD")
    fit(other, batches(8, 4))
    fit(other, batches(8, 4))
    return weights(module), weights(other)


def test_a_second_fit_goes_on_from_the_weights() -> None:
    twice, afresh = Plain("SGD").double(), Plain("SGD").double()
    for module, epochs in ((twice, (0, 1)), (afresh, (0, 0))):
        for epoch in epochs:  # each with a new optimizer, as configure_optimizers makes one
            by_hand(module, dealt(8, 4, 2, epoch))
    for same_trainer, new_trainer in run(_twice, 2):
        close(same_trainer, weights(twice))
        close(new_trainer, weights(afresh))


class Callbacks(pl.Callback):
    def __init__(self) -> None:
        self.equal: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        flat = torch.cat([p.detach().reshape(-1) for p in pl_module.parameters()])
        parts = [torch.empty_like(flat) for _ in range(trainer.world_size)]
        torch.distributed.all_gather(parts, flat)
        self.equal.append(torch.equal(parts[0], parts[1]))


def _hooks() -> list[bool]:
    watch = Callbacks()
    fit(Plain(), batches(16, 2), callbacks=[watch])
    return watch.equal


def test_hooks_between_steps_see_whole_weights() -> None:
    assert run(_hooks, 2) == [[True] * 4] * 2


EPOCH = 4


def _turns_by_hand(optimizer: str, ranks: int, same: bool, epochs: int = 3) -> list[list[float]]:
    module = Turns(optimizer, same=same).double()
    stepper = module.configure_optimizers()
    for epoch in range(epochs):
        module.begin_epoch(epoch)
        for step, shares in enumerate(dealt(EPOCH * 6, 6 // ranks, ranks, epoch)):
            stepper.zero_grad()
            for rank, share in enumerate(shares):
                (module.loss(share, step, rank) / ranks).backward()  # type: ignore[no-untyped-call]
            stepper.step()
    return weights(module)


LAYOUTS: dict[str, dict[str, Any]] = {
    "no_shard": {"level": "no_shard"},
    "optim": {"level": "optim"},
    "optim_grads": {"level": "optim_grads", "units": (nn.Linear,)},
    "optim_grads_params": {"level": "optim_grads_params", "units": (nn.Linear,)},
    "tensor": {"tensor_parallel": 2, "plan": ParallelizePlan({"net.0": Column(), "net.2": Row()})},
}


def _turns(
    layout: str,
    given: dict[str, Any],
    size: int,
    epochs: int = 3,
    path: str | None = None,
    save: str | None = None,
) -> list[list[float]]:
    module = Turns(**given)
    options = dict(LAYOUTS[layout])
    sharing = {name: options.pop(name) for name in ("level", "units") if name in options}
    how = MegatronStrategy(data_parallel=data_parallel(**sharing), **options)
    found: list[dict[str, Tensor]] = []

    def read(*_: Any) -> None:  # weights are whole where hooks run, on any level
        values = {name: p.detach().clone() for name, p in module.named_parameters()}
        found.append(gather_canonical(values, how.parallel_model.specs, how.mesh, sum_partial=False))

    callbacks = [pl.callbacks.LambdaCallback(on_train_end=read)]
    loader = batches(EPOCH * 6, size)
    sampler = size < 6
    runner = trainer(
        how, max_steps=-1, max_epochs=epochs, limit_val_batches=0, callbacks=callbacks, use_distributed_sampler=sampler
    )
    runner.fit(module, loader, ckpt_path=path)
    if save is not None:
        runner.save_checkpoint(save)
    keys = [how.parallel_model.specs[name].pieces[0].name for name, _ in module.named_parameters()]
    return [found[0][key].reshape(-1).tolist() for key in keys]


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("SGD", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("ranks", "layout", "frozen_at_first"),
    [
        (1, "optim", False),
        (1, "optim", True),
        (2, "no_shard", False),
        (2, "optim", False),
        (2, "optim", True),
        (2, "optim_grads", False),
        (2, "optim_grads_params", False),
        (2, "tensor", False),
    ],
)
def test_what_has_no_gradient_stays_as_in_torch(ranks: int, layout: str, frozen_at_first: bool, optimizer: str) -> None:
    same = layout not in ("no_shard", "optim")  # there replicas, or the parts of a model, run the same layers
    replicas = 1 if layout == "tensor" else ranks
    expected = _turns_by_hand(optimizer, replicas, same)
    given = {"optimizer": optimizer, "same": same, "frozen_at_first": frozen_at_first}
    for rank in run(_turns, ranks, layout, given, 6 // replicas):
        close(rank, expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, "optim"), (2, "optim")),
        ((2, "optim"), (2, "optim_grads_params")),
        ((2, "optim_grads_params"), (2, "tensor")),
        ((2, "tensor"), (1, "no_shard")),
    ],
)
def test_counts_of_parameters_resume_in_another_layout(
    tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    expected = _turns_by_hand("AdamW", 1, True)
    path, given = str(tmp_path / "a.ckpt"), {"optimizer": "AdamW", "same": True}
    run(_turns, before[0], before[1], given, 6, 2, None, path)
    for rank in run(_turns, after[0], after[1], given, 6, 3, path):
        close(rank, expected)
