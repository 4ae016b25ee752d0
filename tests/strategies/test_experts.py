"""MegatronStrategy divides experts over ranks: the same run as on one device, whatever number of micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.gpt import GPT, GPTConfig
from megalight.nn.init import initialize
from megalight.nn.moe import BalanceConfig, CapacityConfig, MoEConfig, Router, RouterConfig
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import MegatronStrategy, PipelineOptions
from megalight.strategies.step import Stepper
from megalight.types import Loss, TokenBatch
from megalight.types.batch import Empty
from tests.strategies.test_layout_changes import Again, contents
from tests.strategies.training import (
    ADAM,
    BASE,
    CLIP,
    SEED,
    Losses,
    WithData,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    fit,
    gathered,
    global_batch,
)
from tests.strategies.training import Gradients as FirstGradients
from tests.support.environment import trainer
from tests.support.workers import run

MOE = MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True))
"""Experts in the last of two layers."""
PLAIN = replace(BASE, moe=MOE)
BALANCED = replace(BASE, moe=replace(MOE, balance=BalanceConfig(aux_loss=0.1, z_loss=0.01)))


class Uneven(WithData):
    """A GPT with experts; each second replica cuts its share into fewer micro-batches than the others."""

    def split_batch(self, batch: TokenBatch, size: int) -> Sequence[TokenBatch]:
        uneven = self.trainer.strategy.mesh.rank("dp") % 2
        return batch.split(len(batch) if uneven else size)


ALL = replace(
    BASE,
    moe=replace(
        MOE,
        pattern=(True,),
        router=RouterConfig(score="sigmoid", num_groups=2, group_top_k=1, scale=1.5, bias=True, expert_bias=True),
        balance=BalanceConfig(seq_aux_loss=0.05, z_loss=0.01),
    ),
)
"""A router with most of its options. Its losses do not depend on how tokens divide into micro-batches."""


EP2 = {"expert_parallel": 2}
TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, EP2),
    "ep2edp2": (4, EP2),
    "ep4": (4, {"expert_parallel": 4}),
    "tp2ep2": (2, {**TP2, **EP2}),
    "tp2dp2ep4": (4, {**TP2, "expert_parallel": 4}),
    "tp2dp2etp2ep2": (4, {**TP2, **EP2, "expert_tensor_parallel": 2}),
    "pp2ep2": (4, {"pipeline_parallel": 2, **EP2}),
    "pp2ep2zb": (4, {"pipeline_parallel": 2, **EP2, "pipeline": PipelineOptions(schedule="zero_bubble")}),
    "ep2again": (2, {**EP2, "recompute": RecomputeOptions(granularity="full")}),
    "cp2ep4": (4, {"context_parallel": 2, "expert_parallel": 4, "expert": ExpertOptions("all_gather")}),
}


@functools.cache
def expected(steps: int = 2, balanced: bool = False) -> dict[str, Any]:
    return by_hand(BALANCED if balanced else PLAIN, steps, micro_batch_size=1)


def _fit(layout: str, level: str, balanced: bool) -> dict[str, Any]:
    gradients = FirstGradients()
    config, kind = (BALANCED, WithData) if balanced else (PLAIN, Uneven)
    options = {"micro_batch_size": 1, "module_type": kind, **LAYOUTS[layout][1]}
    found = fit(config, options={"level": level}, extra_callbacks=[gradients], **options)
    return {**found, "gradients": gradients.first}


FULL = ("tp2dp2etp2ep2", "tp2dp2ep4", "ep2", "ep4", "pp2ep2", "cp2ep4", "ep2edp2")
"""Layouts that only whole runs have: others divide experts beside each of these axes."""


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.full] * (layout in FULL)) for layout in LAYOUTS]
)
def test_the_same_run_as_on_one_device(layout: str) -> None:
    for level in ("optim", "no_shard", "optim_grads_params") if layout in ("ep2edp2",) else ("optim",):
        found = run(_fit, LAYOUTS[layout][0], layout, level, True)
        for rank in found:
            assert rank["losses"] == found[0]["losses"], "ranks report different losses"
        assert_same_run(found[0], expected(balanced=True))
        assert_same_gradients(found[0]["gradients"], expected(balanced=True)["gradients"])
    assert max(expected(balanced=True)["norms"]) > CLIP, "nothing was clipped"


@pytest.mark.parametrize("layout", [pytest.param("ep2", marks=pytest.mark.full), "ep4", "pp2ep2"])
def test_ranks_with_fewer_micro_batches(layout: str) -> None:
    found = run(_fit, LAYOUTS[layout][0], layout, "optim", False)
    assert_same_run(found[0], expected())
    assert_same_gradients(found[0]["gradients"], expected()["gradients"])


class ExpertBias(pl.Callback):
    """Keeps the expert bias and the loads of each layer after each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, list[float]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        routers = {name: m for name, m in pl_module.named_modules() if isinstance(m, Router)}
        values = {f"{name} bias": router.expert_bias for name, router in routers.items()}
        values |= {f"{name} loads": router.loads for name, router in routers.items()}
        self.rows.append({name: value.tolist() for name, value in values.items() if value is not None})


ALL_LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "again": (1, 2, {"recompute": RecomputeOptions(granularity="full")}),
    "dp2": (2, 2, {}),
    "ep2": (2, 1, EP2),
    "tp2dp2ep2": (4, 1, {**TP2, **EP2}),
    "cp2ep2": (2, 2, {"context_parallel": 2, **EP2}),
    "pp2ep2": (4, 1, {"pipeline_parallel": 2, **EP2}),
}
"""Name -> ranks, samples per micro-batch, options."""


def _fit_all(layout: str) -> dict[str, Any]:
    gradients, bias = FirstGradients(), ExpertBias()
    _, size, options = ALL_LAYOUTS[layout]
    found = fit(ALL, extra_callbacks=[gradients, bias], micro_batch_size=size, **options)
    return {**found, "gradients": gradients.first, "bias": bias.rows}


@functools.cache
def whole_batches() -> dict[str, Any]:
    """On one device, without micro-batches."""
    return run(_fit_all, 1, "one")[0]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name in ("dp2", "ep2", "tp2dp2ep2", "pp2ep2")))
        for name in ALL_LAYOUTS
    ],
)
def test_no_layout_changes_losses_and_biases(layout: str) -> None:
    """Tensor, context, expert, pipeline and data parallelism, micro-batches, padding and recompute."""
    found, expected = run(_fit_all, ALL_LAYOUTS[layout][0], layout), whole_batches()
    assert_same_run(found[0], expected)
    assert_same_gradients(found[0]["gradients"], expected["gradients"])
    counts: dict[str, list[float]] = {}
    for rank in found:
        for step, row in enumerate(rank["bias"]):
            assert row
            assert row.items() <= expected["bias"][step].items()
            counts |= row
    assert counts.keys() == expected["bias"][0].keys()
    loads = [sum(values) for name, values in counts.items() if name.endswith("loads")]
    assert loads == [4 * 12 * 2] * 2
    assert any(any(values) for name, values in counts.items() if name.endswith("bias"))


PACKED = {
    "apart": (1, {"micro_batch_size": 1}),
    "uneven": (2, {"micro_batch_size": 1, "module_type": Uneven, **EP2}),
    "tp2dp2ep2": (4, {"micro_batch_size": 1, **TP2, **EP2}),
    "cp2": (2, {"micro_batch_size": 2, "context_parallel": 2}),
    "pp2": (2, {"micro_batch_size": 1, "pipeline_parallel": 2}),
}
"""Rows have different numbers of documents. Name -> ranks, options."""


def _fit_packed(options: dict[str, Any]) -> dict[str, Any]:
    gradients = FirstGradients()
    found = fit(ALL, packed=True, extra_callbacks=[gradients], **options)
    return {**found, "gradients": gradients.first}


@functools.cache
def whole_packed() -> dict[str, Any]:
    return by_hand(ALL, packed=True)


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.full] * (layout == "tp2dp2ep2")) for layout in PACKED]
)
def test_balance_over_sequences_is_a_mean_over_those_of_the_step(layout: str) -> None:
    """Micro-batches with few documents count less. One device has the whole batch as a single micro-batch."""
    ranks, options = PACKED[layout]
    found = run(_fit_packed, ranks, options)[0]
    assert_same_gradients(found["gradients"], whole_packed()["gradients"])
    np.testing.assert_allclose(found["losses"][0], whole_packed()["losses"][0], rtol=1e-9)


GLOBAL, AUX = (
    replace(BASE, moe=replace(MOE, balance=BalanceConfig(**{name: 0.2}))) for name in ("global_aux_loss", "aux_loss")
)


def _fit_global(options: dict[str, Any], size: int | None, uneven: bool) -> dict[str, Any]:
    gradients = FirstGradients()
    kind = Uneven if uneven else WithData
    found = fit(GLOBAL, extra_callbacks=[gradients], micro_batch_size=size, module_type=kind, **options)
    return {**found, "gradients": gradients.first}


@pytest.mark.parametrize("options", [{}, EP2, TP2, {"context_parallel": 2}])
def test_the_global_loss_is_over_all_replicas(options: dict[str, Any]) -> None:
    """With one micro-batch on each rank it is the loss over the whole batch."""
    found = run(_fit_global, 2, options, None, False)[0]
    expected = by_hand(AUX)
    assert_same_run(found, expected)
    assert_same_gradients(found["gradients"], expected["gradients"])


def test_the_global_loss_and_ranks_with_fewer_micro_batches() -> None:
    found = run(_fit_global, 2, {}, 1, True)
    assert found[0]["losses"] == found[1]["losses"]
    assert found[0]["norms"] == found[1]["norms"]


def _fit_capped(pad: bool, options: dict[str, Any]) -> dict[str, Any]:
    return fit(capped(pad), micro_batch_size=1, **options)


def capped(pad: bool) -> GPTConfig:
    """Experts that get at most five of the twelve tokens of a micro-batch."""
    return replace(BASE, moe=replace(MOE, capacity=CapacityConfig(factor=0.75, pad=pad)))


@pytest.mark.parametrize(
    ("pad", "options"),
    [(False, EP2), (True, EP2), (True, {**EP2, "expert": ExpertOptions("all_gather")})],
)
def test_dropped_tokens(pad: bool, options: dict[str, Any]) -> None:
    assert_same_run(run(_fit_capped, 2, pad, options)[0], by_hand(capped(pad), micro_batch_size=1))


class OwnStep(Uneven):
    """The user's own step: the mean loss of a micro-batch's samples."""

    def training_step(self, batch: TokenBatch, *args: Any) -> torch.Tensor:
        assert self.model is not None
        return self.loss_step(self.forward_step(self.model, batch), batch).sum / len(batch)


def _own(layout: str) -> dict[str, Any]:
    return fit(PLAIN, module_type=OwnStep, micro_batch_size=1, **LAYOUTS[layout][1])


def test_steps_that_users_wrote_skip_empty_micro_batches() -> None:
    found, expected = run(_own, 2, "ep2")[0], run(_own, 1, "one")[0]
    assert_same_run(found, expected)


class Logging(Uneven):
    """Logs in every micro-batch, from a step of one's own or not."""

    def loss_step(self, carry: Any, batch: TokenBatch) -> Loss:
        loss = super().loss_step(carry, batch)
        each = {"on_epoch": True, "sync_dist": True}
        self.log("mean", loss.sum / len(batch), batch_size=len(batch), **each)  # type: ignore[arg-type]
        self.log("sum", loss.sum, reduce_fx="sum", **each)  # type: ignore[arg-type]
        self.log("largest", batch.tokens.double().max(), reduce_fx="max", **each)  # type: ignore[arg-type]
        return loss


class OwnLogging(Logging):
    training_step = OwnStep.training_step


def _logged(options: dict[str, Any], own: bool) -> dict[str, float]:
    module = (OwnLogging if own else Logging)(PLAIN, optimizer=ADAM, seed=SEED)
    module.steps = 2
    strategy = MegatronStrategy(micro_batch_size=1, **options)
    runner = trainer(strategy, max_steps=-1, max_epochs=1, use_distributed_sampler=False, limit_val_batches=0)
    runner.fit(module)
    return {name: float(runner.callback_metrics[f"{name}_epoch"]) for name in ("mean", "sum", "largest")}


@pytest.mark.parametrize("own", [False, True])
def test_empty_micro_batches_add_nothing_to_what_a_step_logs(own: bool) -> None:
    (expected,) = run(_logged, 1, {}, own)
    for found in run(_logged, 2, EP2, own):
        assert found == pytest.approx(expected, rel=1e-9)


AT, STEPS = 2, 4


def _part(
    layout: str, stop: int, resume: str | None, save: str, again: str | None
) -> tuple[list[float], dict[str, Any]]:
    strategy = MegatronStrategy(micro_batch_size=1, **LAYOUTS[layout][1])
    losses = Losses()
    module = Uneven(PLAIN, optimizer=ADAM, seed=SEED)
    module.steps = STEPS
    runner = trainer(
        strategy,
        callbacks=[losses, *([] if again is None else [Again(again)])],
        max_steps=stop,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module, ckpt_path=resume)
    if save:
        runner.save_checkpoint(save)
    return losses.losses, gathered(strategy, module)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ep2", "one"),
        pytest.param("one", "ep2edp2", marks=pytest.mark.full),
        pytest.param("ep2edp2", "tp2dp2ep4", marks=pytest.mark.full),
    ],
)
def test_checkpoints_go_from_one_layout_to_another(before: str, after: str, tmp_path: Path) -> None:
    saved, again = str(tmp_path / "saved.ckpt"), str(tmp_path / "again.ckpt")
    run(_part, LAYOUTS[before][0], before, AT, None, saved, None)
    losses, final = run(_part, LAYOUTS[after][0], after, STEPS, saved, "", again)[0]
    first, second = contents(saved), contents(again)
    assert {f"model.layers.1.mlp.experts.{e}.down.weight" for e in range(4)} < first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    whole = expected(STEPS)
    np.testing.assert_allclose(losses, whole["losses"][AT:], rtol=1e-9)
    for name, value in whole["final"].items():
        error = np.linalg.norm(final[name] - value) / max(float(np.linalg.norm(value)), 1e-3)
        assert error <= 1e-9, f"{name} differs by {error:.2e}"


def _refused(options: dict[str, Any], module_type: type[WithData]) -> None:
    module = module_type(PLAIN if module_type is Uneven else BASE, optimizer=ADAM, seed=SEED)
    trainer(MegatronStrategy(**options), use_distributed_sampler=False).fit(module)


@pytest.mark.parametrize(
    ("options", "module_type", "message"),
    [
        ({"expert_parallel": 2}, WithData, r"ep=2 divides experts .* Expert\(\) for no module"),
        ({"expert_parallel": 3}, Uneven, "world size 1 is not a multiple of etp x ep x pp = 3"),
    ],
)
def test_layouts_that_cannot_work(options: dict[str, Any], module_type: type[WithData], message: str) -> None:
    ranks = 2 if module_type is WithData else 1
    with pytest.raises((AssertionError, LayoutError), match=message):
        run(_refused, ranks, options, module_type)


class Lengths(Uneven):
    """Each replica evaluates, and trains on, a number of batches of its own; ``sized``: loaders tell it beforehand."""

    counts = (1, 3)
    sized = True

    def val_dataloader(self) -> Any:
        rows = [global_batch(step) for step in range(max(self.counts))]
        replica = self.trainer.strategy.mesh.rank("dp")
        own = [rows[step].split(2)[replica] for step in range(self.counts[replica])]
        data = own if self.sized else Unsized(own)
        return DataLoader(data, batch_size=None)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = train_dataloader = val_dataloader


class Unsized(torch.utils.data.IterableDataset[TokenBatch]):
    def __init__(self, batches: list[TokenBatch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[TokenBatch]:
        return iter(self.batches)


def _evaluate(sized: bool) -> tuple[float, list[float], list[float]]:
    """Test loss, the sum of the losses of each batch of this rank, and losses of training for an epoch."""
    module = Lengths(PLAIN, optimizer=ADAM, seed=SEED)
    module.sized = sized
    strategy = MegatronStrategy(expert_parallel=2, micro_batch_size=1)
    runner = trainer(strategy, use_distributed_sampler=False)
    (found,) = runner.test(module, verbose=False)
    predictions = [float(losses.sum()) for losses in runner.predict(module) or [] if losses is not None]
    losses = Losses()
    runner = trainer(
        MegatronStrategy(expert_parallel=2, micro_batch_size=1),
        use_distributed_sampler=False,
        callbacks=[losses],
        max_epochs=1,
        max_steps=-1,
        gradient_clip_val=CLIP,
        limit_val_batches=0,
    )
    runner.fit(module)
    return found["test_loss"], predictions, losses.losses


@pytest.mark.parametrize("sized", [True, False])
def test_loaders_of_different_lengths(sized: bool) -> None:
    model = GPT(PLAIN).double()
    initialize(model, SEED, "model.")
    module = Lengths(PLAIN, optimizer=ADAM, seed=SEED)
    sums, counts = [], []
    for replica, length in enumerate(Lengths.counts):
        batches = [global_batch(step).split(2)[replica] for step in range(length)]
        with torch.no_grad():
            losses = [module.loss_step(module.forward_step(model, batch), batch) for batch in batches]
        sums.append([float(loss.sum) for loss in losses])
        counts.append([float(batch.loss_mask.sum()) for batch in batches])
    for replica, (test_loss, predictions, trained) in enumerate(run(_evaluate, 2, sized)):
        assert test_loss == pytest.approx(sum(map(sum, sums)) / sum(map(sum, counts)), rel=1e-9)
        assert predictions == pytest.approx(sums[replica], rel=1e-9)
        assert trained[0] == pytest.approx((sums[0][0] + sums[1][0]) / (counts[0][0] + counts[1][0]), rel=1e-9)
        assert len(trained) == 3


def test_steps_that_users_wrote_refuse_empty_batches() -> None:
    class Own(pl.LightningModule):
        def validation_step(self, batch: Any) -> Any:
            raise AssertionError("not called")

    stepper = SimpleNamespace(module=Own())
    with pytest.raises(ConfigurationError, match="Own defines validation_step, and this rank has fewer batches"):
        Stepper.by_user(stepper, "validation_step", (Empty("batch"),))  # type: ignore[arg-type]
