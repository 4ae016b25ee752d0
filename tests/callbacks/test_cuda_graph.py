"""Whole steps recorded and replayed, on a tape that keeps to the rules of CUDA graphs: the same run as without."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from megalight.callbacks import CUDAGraph
from megalight.callbacks.cuda_graph import parts_of
from megalight.callbacks.cuda_graph_validation import of_environment, of_parts, of_whole_steps
from megalight.errors import ConfigurationError
from megalight.models.gpt import DeltaNetConfig, DropoutConfig, MambaConfig, MultiTokenConfig
from megalight.models.module import Carry
from megalight.nn.moe import BalanceConfig, CapacityConfig, LocalDispatcher, MoEConfig, RouterConfig
from megalight.ops.linear.low_precision import LowPrecision
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.precision import LowPrecisionOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.plugins.precision import MegatronLowPrecision
from megalight.strategies import MegatronStrategy, PipelineOptions
from megalight.types import Loss, TokenBatch
from tests.parallel.data_parallel.stale import stale_gradients
from tests.parallel.graphs.tape import Tape
from tests.strategies.test_low_precision import CONFIG as WIDE
from tests.strategies.toy import Kept, ToyModule
from tests.strategies.training import ADAM, BASE, SEED, WithData, assert_same_run, fit, gathered
from tests.support.environment import trainer
from tests.support.workers import run

STEPS = 4
"""Two of them warm up; the third is recorded and replayed, and the fourth replays what that replay has left."""
NEVER = 1000
"""Warm-up steps of a run that stays eager."""
EVALUATING = {"limit_val_batches": 1, "val_check_interval": 1}
LATER = PipelineOptions(schedule="zero_bubble")
DROPPING = replace(BASE, dropout=DropoutConfig(hidden=0.2, attention=0.1, embedding=0.1))
FOUR = replace(DROPPING, num_layers=4)
EXPERTS = replace(
    BASE,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=12,
        pattern=(False, True),
        router=RouterConfig(score="sigmoid", expert_bias=True, expert_bias_rate=0.1),
        balance=BalanceConfig(aux_loss=0.1, global_aux_loss=0.1, z_loss=0.01),
        capacity=CapacityConfig(factor=1.5, pad=True),
    ),
)
"""Experts with a fixed number of rows, and counts of the step that is on its way."""
ROUTED = replace(EXPERTS, moe=replace(EXPERTS.moe, capacity=None))
"""The number of rows depends on the routes."""
WIDE_EXPERTS = replace(WIDE, moe=replace(EXPERTS.moe, ffn_hidden_size=32))
PP2 = {"pipeline_parallel": 2}
EP2 = {"micro_batch_size": 1, "expert_parallel": 2, "expert": ExpertOptions(equal_tokens=True)}


def train(config: Any, warmup: int, options: dict[str, Any]) -> Any:
    """A run in every rank, whose steps are recorded after ``warmup`` of them; and what was recorded."""
    callback = CUDAGraph(warmup_steps=warmup)
    callback.recorder = tape = Tape()
    found = fit(config, options.pop("steps", STEPS), extra_callbacks=[callback], **options)
    assert tape.entered == 0
    assert not tape.tapes, "all is given back"
    return {**found, "replays": callback.replays, "made": tape.made, "reasons": callback.reasons}


def accumulate(self: LowPrecision, main_grad: Tensor, grad_y: Tensor, x: Any, write: bool) -> None:
    """As a GPU's product does it: the first gradient of a step is written."""
    gradient = self.weight_gradient(grad_y, x, main_grad)
    main_grad.copy_(gradient if write else main_grad + gradient)


def train_parts(config: Any, scope: Any, warmup: int, options: dict[str, Any]) -> Any:
    """The same with a graph for every layer, or its attention."""
    callback = CUDAGraph(scope, warmup_steps=warmup)
    callback.recorder = tape = Tape()
    with mock.patch.object(LowPrecision, "accumulate", accumulate):
        found = fit(config, STEPS, extra_callbacks=[callback], **options)
    assert not tape.tapes
    return {**found, "replays": callback.replays, "made": tape.made, "reasons": callback.reasons}


def low_precision(recipe: str, precision: str = "64-true", **more: Any) -> dict[str, Any]:
    """Emulated: one cast of each weight per step, histories, and generators for stochastic rounding."""
    plugin = MegatronLowPrecision(LowPrecisionOptions(emulate=True, recipe=recipe, **more), precision)
    return {"micro_batch_size": 2, "trainer_options": {"precision": None}, "precision_plugin": plugin}


MIXED = {**low_precision("delayed", "bf16-mixed", first_layers=1), "pipeline_parallel": 2, "virtual_pipeline": 2}
"""Of four layers the first stays in bf16, and its rank has another one in FP8."""
RUNS: dict[str, tuple[int, Any, dict[str, Any], int, int]] = {
    "one device": (1, DROPPING, {"micro_batch_size": 2}, STEPS - 2, 1),
    "dp": (2, DROPPING, {"micro_batch_size": 1}, STEPS - 2, 1),
    "dp, all masters": (2, BASE, {"micro_batch_size": 1, "options": {"level": "no_shard"}}, STEPS - 2, 1),
    "tp": (
        2,
        DROPPING,
        {"micro_batch_size": 2, "tensor_parallel": 2, "sequence_parallel": True},
        STEPS - 2,
        1,
    ),
    "pp": (2, DROPPING, {"micro_batch_size": 1, "pipeline_parallel": 2}, STEPS - 2, 1),
    "vpp": (
        2,
        replace(DROPPING, num_layers=4),
        {"micro_batch_size": 1, "pipeline_parallel": 2, "virtual_pipeline": 2},
        STEPS - 2,
        1,
    ),
    "zero bubble": (2, FOUR, {"micro_batch_size": 1, "pipeline_parallel": 2, "pipeline": LATER}, STEPS - 2, 1),
    "cp": (2, BASE, {"micro_batch_size": 1, "context_parallel": 2, "context": ContextOptions("ring")}, STEPS - 2, 1),
    "validation": (
        1,
        DROPPING,
        {"trainer_options": EVALUATING},
        STEPS - 2,
        1,
    ),
    "recompute": (
        1,
        BASE,
        {"recompute": RecomputeOptions(granularity="selective", modules=("attention", "mlp_norm"))},
        STEPS - 2,
        1,
    ),
    "delayed scales": (1, WIDE, low_precision("delayed"), STEPS - 2, 1),
    "vpp, first layer in bf16": (2, replace(WIDE, num_layers=4), MIXED, STEPS - 2, 1),
    "stochastic rounding": (1, WIDE, low_precision("nvfp4"), STEPS - 2, 1),
    "experts": (1, EXPERTS, {"micro_batch_size": 2}, STEPS - 2, 1),
    "experts, forced": (
        1,
        replace(EXPERTS, moe=replace(EXPERTS.moe, router=RouterConfig(force_balance=True))),
        {"micro_batch_size": 2},
        STEPS - 2,
        1,
    ),
    "experts, ep": (2, EXPERTS, EP2, STEPS - 2, 1),
    "FP8 weights": (2, WIDE, low_precision("tensorwise", primary_weights=True), STEPS - 2, 1),
}


WHOLE_RUNS = (
    *("dp, all masters", "zero bubble", "recompute", "stochastic rounding", "units, vpp", "sharded gradients"),
    # Others have these features, beside more.
    *("pp", "vpp", "experts, delayed scales", "layer, dp", "layer, tp", "layer, experts"),
    *("layer, vpp, first layer in bf16", "experts, forced", "layer, experts, ep", "layer, depths"),
    *("dp", "cp", "layer, FP8 weights", "layer, hybrid", "experts, ep"),
)
"""Runs, of steps and of parts, that whole test sessions make."""


def named(runs: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.full] * name.endswith(WHOLE_RUNS)) for name in runs]


@functools.cache
def eager(name: str) -> list[Any]:
    """The eager run of a row, on every rank."""
    ranks, config, options, *_ = RUNS[name]
    return run(train, ranks, config, NEVER, options)


@pytest.mark.parametrize("name", named(RUNS))
def test_replays_train_as_eager_steps_do(name: str) -> None:
    ranks, config, options, replays, graphs = RUNS[name]
    expected = eager(name)
    found = run(train, ranks, config, 2, options)
    for here, there in zip(found, expected, strict=True):
        assert (here["reasons"], here["replays"], here["made"]) == ([], replays, graphs)
        assert (there["replays"], there["made"]) == (0, 0)
        assert_same_run(here, there, 1e-13)
        assert here["metrics"] == pytest.approx(there["metrics"], rel=1e-12)


DEEPER = replace(DROPPING, mtp=MultiTokenConfig(num_layers=2))
HYBRID = replace(
    DROPPING,
    num_layers=4,
    layer_pattern="MG*-",
    mamba=MambaConfig(num_heads=4, head_dim=4, state_size=8, num_groups=2),
    delta=DeltaNetConfig(num_heads=4, num_key_heads=2, head_dim=4, key_dim=4),
)
SELECTIVE = RecomputeOptions(granularity="selective", modules=("attention.inner", "mlp_norm"))
SHARDED = {"micro_batch_size": 1, "options": {"level": "optim_grads_params"}}
PARTS: dict[str, tuple[str, int, Any, dict[str, Any], int, int]] = {
    "layer": ("layer", 1, DROPPING, {"micro_batch_size": 2}, 2 * 2, 2 * 2),
    "attention": ("attention", 1, DROPPING, {"micro_batch_size": 2}, 2 * 2, 2 * 2),
    "layer, dp": ("layer", 2, DROPPING, {"micro_batch_size": 1, "options": {"bucket_size": 4000}}, 2 * 2, 2 * 2),
    "layer, tp": (
        "layer",
        2,
        DROPPING,
        {"micro_batch_size": 2, "tensor_parallel": 2, "sequence_parallel": True},
        2 * 2,
        2 * 2,
    ),
    "layer, vpp": (
        "layer",
        2,
        FOUR,
        {"micro_batch_size": 1, "pipeline_parallel": 2, "virtual_pipeline": 2},
        2 * 4,
        0,
    ),
    "attention, pp": ("attention", 2, FOUR, {"micro_batch_size": 1, "pipeline_parallel": 2}, 2 * 4, 0),
    "layer, hybrid": (
        "layer",
        2,
        HYBRID,
        {"micro_batch_size": 2, "tensor_parallel": 2, "sequence_parallel": True},
        2 * 4,
        2 * 4,
    ),
    "layer, depths": ("layer", 1, DEEPER, {"micro_batch_size": 2}, 2 * 4, 2 * 4),
    "layer, validation": ("layer", 1, DROPPING, {"micro_batch_size": 2, "trainer_options": EVALUATING}, 2 * 2, 2 * 2),
    "layer, recompute": ("layer", 1, BASE, {"micro_batch_size": 2, "recompute": SELECTIVE}, 2 * 2, 2 * 2),
    "layer, delayed scales": ("layer", 1, WIDE, low_precision("delayed"), 2 * 2, 2 * 2),
    "layer, vpp, first layer in bf16": ("layer", 2, replace(WIDE, num_layers=4), MIXED, 2 * 2, 0),
    "layer, FP8 weights": (
        "layer",
        2,
        WIDE,
        low_precision("tensorwise", primary_weights=True),
        2 * 1,
        2 * 2,
    ),
    "layer, experts": ("layer", 1, EXPERTS, {"micro_batch_size": 2}, 2 * 2, 2 * 2),
    "layer, experts, ep": ("layer", 2, EXPERTS, EP2, 2 * 2, 2 * 2),
    "layer, experts, delayed scales": ("layer", 1, WIDE_EXPERTS, low_precision("delayed"), 2 * 2, 2 * 2),
    "router, ep": ("router", 2, ROUTED, {"micro_batch_size": 1, "expert_parallel": 2}, 2 * 3, 2 * 3),
    "layer, units": ("layer", 2, FOUR, {**SHARDED, "trainer_options": EVALUATING}, 2 * 4, 2 * 4),
    "layer, units, vpp": (
        "layer",
        4,
        FOUR,
        {**SHARDED, "pipeline_parallel": 2, "virtual_pipeline": 2},
        2 * 2,
        0,
    ),
    "attention, sharded gradients": (
        "attention",
        2,
        DROPPING,
        {"micro_batch_size": 1, "options": {"level": "optim_grads"}},
        2 * 2,
        2 * 2,
    ),
    "layer, stochastic rounding": ("layer", 1, WIDE, low_precision("nvfp4"), 2 * 2, 2 * 2),
}
"""Scope, ranks, model, options; forwards of parts per step and rank; recordings, where they are the same everywhere."""


@pytest.mark.parametrize("name", named(PARTS))
def test_replays_of_parts_train_as_eager_ones_do(name: str) -> None:
    scope, ranks, config, options, forwards, made = PARTS[name]
    # Of a row that is also one of whole steps, except where products in 8 bits accumulate as a GPU's do.
    same = [row for row, (*each, _, _) in RUNS.items() if each == [ranks, config, options]]
    plain = "precision_plugin" not in options
    expected = eager(same[0]) if same and plain else run(train_parts, ranks, config, scope, NEVER, options)
    found = run(train_parts, ranks, config, scope, 2, options)
    for here, there in zip(found, expected, strict=True):
        assert (here["reasons"], here["replays"]) == ([], (STEPS - 2) * forwards)
        assert here["made"] == made or not made
        assert there["made"] == 0
        assert_same_run(here, there, 1e-13)


def accumulated(warmup: int, recipe: str | None, window: int) -> Any:
    """So many batches, of two micro-batches each, to every step of the optimizer."""
    callback = CUDAGraph(warmup_steps=warmup)
    callback.recorder = tape = Tape()
    module = WithData(DROPPING if recipe is None else WIDE, optimizer=ADAM, seed=SEED)
    module.steps = 4 * window
    plugin = None if recipe is None else low_precision(recipe)["precision_plugin"]
    strategy = MegatronStrategy(micro_batch_size=2, precision_plugin=plugin)
    options: dict[str, Any] = {"accumulate_grad_batches": window, "max_steps": 4, "limit_val_batches": 0}
    options |= {"use_distributed_sampler": False} | ({} if recipe is None else {"precision": None})
    runner = trainer(strategy, callbacks=[callback], gradient_clip_val=0.5, **options)
    with stale_gradients():
        runner.fit(module)
    return gathered(strategy, module), callback.replays, tape.made


@pytest.mark.parametrize(
    ("recipe", "window"),
    [(None, 3), *(pytest.param(*each, marks=pytest.mark.full) for each in ((None, 2), ("tensorwise", 3)))],
)
def test_batches_accumulate(recipe: str | None, window: int) -> None:
    expected, _, _ = run(accumulated, 1, NEVER, recipe, window)[0]
    found, replays, made = run(accumulated, 1, 2, recipe, window)[0]
    assert (replays, made) == (2 * window, window), "graphs of passes that write, that add, and that reduce"
    for name, value in expected.items():
        assert abs(found[name] - value).max() < 1e-13, name


def interrupted(folder: str, warmup: int) -> Any:
    """A run that is saved after three steps and taken up again by another trainer."""
    for steps in (3, 7):
        callback = CUDAGraph(warmup_steps=warmup)
        callback.recorder = Tape()
        module = WithData(DROPPING, optimizer=ADAM, seed=SEED)
        module.steps = 7
        strategy = MegatronStrategy(micro_batch_size=2)
        quiet = {"limit_val_batches": 0, "use_distributed_sampler": False}
        runner = trainer(strategy, callbacks=[callback], max_steps=steps, **quiet)
        runner.fit(module, ckpt_path=f"{folder}/{warmup}" if steps == 7 else None)
        if steps == 3:
            runner.save_checkpoint(f"{folder}/{warmup}")
    return gathered(strategy, module), callback.replays


def test_a_resumed_run_goes_on_as_an_eager_one(tmp_path: Path) -> None:
    expected, _ = run(interrupted, 1, str(tmp_path), NEVER)[0]
    found, replays = run(interrupted, 1, str(tmp_path), 2)[0]
    assert replays == 2
    for name, value in expected.items():
        assert abs(found[name] - value).max() < 1e-13, name


class Reading(ToyModule):
    """Its loss_step reads values on the host."""


class Quiet(ToyModule):
    """Nothing stands against recording it."""

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        error = carry["hidden"] - batch["y"]
        return Loss(error.square().sum(), {"penalty": carry["penalty"]})

    def loss_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.full((), float(batch["y"].numel()))


class Logging(Quiet):
    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss_step(carry, batch)
        self.log("seen", loss.sum.detach())
        return loss


class Masking(Quiet):
    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        error = carry["hidden"] - batch["y"]
        return Loss(error[error > 0].square().sum())


class Scheduled(Quiet):
    """Its loss weighs more with every step, by a number on the host."""

    def weight(self) -> float:
        return 1.0 + 10.0 * self.trainer.global_step

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss_step(carry, batch)
        return Loss(self.weight() * loss.sum, loss.aux_losses)


class Counting(Scheduled):
    def weight(self) -> float:
        return 1.0 + 10.0 * self.global_step


class Aging(Scheduled):
    def weight(self) -> float:
        return 1.0 + 10.0 * self.current_epoch


class InABuffer(Scheduled):
    """The same weight, as a graph can read it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("now", torch.ones(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.now.fill_(1.0 + 10.0 * self.trainer.global_step)

    def weight(self) -> Any:
        return self.now


class Own(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


def ignore(*args: Any) -> None:
    """A hook that does nothing."""


class Watching(pl.Callback):
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        pass


class Hooking(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.model.head.register_forward_hook(lambda *given: None)


class Freezing(pl.Callback):
    """Takes all gradients of the third step on away, on the host."""

    def __init__(self, when: str, inside: str = "", kind: str = "register_hook") -> None:
        self.when, self.inside, self.kind = when, inside, kind

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hook("fit", trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hook("train", trainer, pl_module)

    def _hook(self, when: str, trainer: pl.Trainer, pl_module: Any) -> None:
        def gone(gradient: Tensor) -> Tensor:
            return gradient * (trainer.global_step < 2)

        def emptied(parameter: Tensor) -> None:
            parameter.main_grad.mul_(trainer.global_step < 2)

        for name, parameter in pl_module.model.named_parameters() if when == self.when else ():
            if self.inside in name:
                getattr(parameter, self.kind)(gone if self.kind == "register_hook" else emptied)


def refused(
    module: Any,
    also: list[pl.Callback],
    on_refusal: Any,
    tape: bool,
    options: dict[str, Any],
    scope: Any = "iteration",
    warmup: int = 2,
) -> Any:
    """Why steps ran eagerly, or the error; replays; and where parameters ended."""
    callback = CUDAGraph(scope, warmup_steps=warmup, on_refusal=on_refusal)
    callback.recorder = Tape() if tape else None
    torch.manual_seed(0)
    try:
        trainer(
            MegatronStrategy(micro_batch_size=2, **options),
            callbacks=[callback, *also],
            limit_val_batches=0,
            max_epochs=2,
            max_steps=4,
            use_distributed_sampler=False,
        ).fit(module)
    except ConfigurationError as error:
        return str(error), callback.replays, None
    return "; ".join(callback.reasons), callback.replays, [p.tolist() for p in module.model.parameters()]


POST = "register_post_accumulate_grad_hook"
REFUSALS: list[tuple[type[ToyModule], list[pl.Callback], str]] = [
    (Reading, [], r"reads a value of a tensor .* at toy.py:\d+ \(loss_step\)"),
    (Masking, [], r"indexes with a mask.* at test_cuda_graph.py:\d+ \(loss_step\)"),
    (Logging, [], "logs 'seen' by self.log"),
    (Quiet, [Watching()], "Watching defines on_before_backward"),
    (Quiet, [LambdaCallback(on_before_backward=ignore)], "LambdaCallback defines on_before_backward"),
    (Quiet, [Hooking()], r"head \(Linear\) has a hook"),
    (Quiet, [Freezing("fit")], r"parameter scale \(and 12 more\) has a hook"),
    (Quiet, [Freezing("train", "head.bias")], r"parameter head.bias has a hook"),
    (Quiet, [Freezing("train", "head.bias", POST)], r"parameter head.bias has a hook.*; remove it"),
    (Scheduled, [], "reads global_step.*; keep it in a buffer"),
    (Counting, [], "reads global_step"),
    (Aging, [], "reads current_epoch"),
]


@pytest.mark.parametrize(("module", "also", "match"), REFUSALS, ids=lambda value: getattr(value, "__name__", None))
def test_what_cannot_be_recorded_runs_eagerly_and_says_why(module: Any, also: Any, match: str) -> None:
    found, replays, parameters = run(refused, 1, module(), also, "eager", True, {})[0]
    assert replays == 0
    assert re.search(match, found), found
    assert parameters == run(refused, 1, module(), also, "eager", True, {}, "iteration", NEVER)[0][2]
    found, _, _ = run(refused, 1, module(), also, "error", True, {})[0]
    assert found.startswith("CUDAGraph cannot record")


class Epochs(Logging):
    """Logs numbers of every micro-batch, also in the steps that are looked through."""

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss_step(carry, batch)
        self.log_dict({"least": carry["hidden"].min().detach(), "one": 1.0}, on_epoch=True, reduce_fx="sum")
        return loss


def _logged(scope: str, warmup: int, options: dict[str, Any]) -> tuple[list[dict[str, float]], int]:
    callback, kept = CUDAGraph(scope, warmup_steps=warmup), Kept()  # type: ignore[arg-type]
    callback.recorder = Tape()
    strategy = MegatronStrategy(micro_batch_size=1, **options)
    runner = trainer(strategy, callbacks=[callback, kept], limit_val_batches=0, max_epochs=2, max_steps=-1)
    runner.fit(Epochs())
    last = {name: float(value) for name, value in runner.callback_metrics.items()}
    return [*kept.seen, last], callback.replays


@pytest.mark.parametrize(
    ("scope", "options"),
    [("iteration", {}), pytest.param("iteration", PP2, marks=pytest.mark.full), ("layer", {}), ("layer", PP2)],
)
def test_no_value_that_a_step_logs_is_lost(scope: str, options: dict[str, Any]) -> None:
    ranks = options.get("pipeline_parallel", 1)
    for (found, replays), (expected, _) in zip(
        run(_logged, ranks, scope, 2, options), run(_logged, ranks, scope, NEVER, options), strict=True
    ):
        assert (replays > 0) == (scope == "layer")
        for here, there in zip(found, expected, strict=True):
            assert here == pytest.approx(there, rel=1e-9)


@pytest.mark.parametrize(
    ("inside", "match", "replays"),
    [
        ("layers", r"parameter layers.0.weight \(and 7 more\) has a hook", 0),
        ("head", "^$", 2 * 3 * 4),
    ],
)
def test_hooks_on_parameters_of_layers_are_refused_and_others_called(inside: str, match: str, replays: int) -> None:
    also = [Freezing("train", inside)]
    expected = run(refused, 1, Quiet(), also, "eager", True, {}, "layer", NEVER)[0]
    found = run(refused, 1, Quiet(), also, "eager", True, {}, "layer")[0]
    assert re.search(match, found[0]), found[0]
    assert found[1] == replays
    torch.testing.assert_close(found[2], expected[2], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("module", [Quiet, InABuffer, Own])
def test_a_module_that_can_be_recorded_is(module: Any) -> None:
    found, replays, parameters = run(refused, 1, module(), [], "error", True, {})[0]
    assert (found, replays) == ("", 2)
    expected = run(refused, 1, module(), [], "error", True, {}, "iteration", NEVER)[0][2]
    torch.testing.assert_close(parameters, expected, rtol=1e-13, atol=1e-13)


def test_there_is_no_cuda_here() -> None:
    assert run(refused, 1, Quiet(), [], "eager", False, {})[0][:2] == ("there are no CUDA graphs on cpu", 0)


@pytest.mark.parametrize(
    ("scope", "ranks", "options", "match"),
    [
        ("layer", 2, {"pipeline_parallel": 2, "pipeline": LATER}, "zero-bubble schedules keep weight gradients back"),
        ("attention", 2, {"context_parallel": 2}, "plans its exchange inside layers"),
        ("layer", 1, {"recompute": RecomputeOptions(granularity="full")}, "recompute of whole layers"),
        (
            "attention",
            1,
            {"recompute": RecomputeOptions(granularity="selective", modules=("attention",))},
            "layers.0.attention is recomputed as a whole",
        ),
        (
            "layer",
            2,
            {"options": {"level": "optim_grads_params", "units": ("MLP",)}},
            "gathers MLP inside layers.0 by hooks",
        ),
        (
            "iteration",
            2,
            {"options": {"level": "optim_grads_params"}},
            "hooks of modules, which a replay does not call",
        ),
    ],
)
def test_layers_that_cannot_be_recorded(scope: str, ranks: int, options: dict[str, Any], match: str) -> None:
    for found in run(train_parts, ranks, BASE, scope, 2, {"micro_batch_size": 2, **options}):
        assert found["replays"] == 0
        assert match in found["reasons"][0]


def test_layers_and_attention_are_found_by_name() -> None:
    model = nn.Module()
    with pytest.raises(ConfigurationError, match=r"CUDAGraph\(scope='layer'\) needs a model with `layers`"):
        parts_of(model, "layer")
    model.layers = nn.ModuleDict({"3": nn.Linear(2, 2)})
    assert [name for name, _ in parts_of(model, "layer")] == ["layers.3"]
    with pytest.raises(ConfigurationError, match=r"layers.3 \(Linear\) has no module `attention`"):
        parts_of(model, "attention")


def test_dropout_is_not_recomputed_in_a_graph() -> None:
    options = {"recompute": RecomputeOptions(granularity="selective", modules=("attention",))}
    found = run(train, 1, DROPPING, 2, options)[0]
    assert found["replays"] == 0
    assert "recompute of layers.0.attention draws dropout masks" in found["reasons"][0]


@pytest.mark.parametrize("segments", ["expandable_segments:True", " expandable_segments: True"])
def test_memory_that_may_move_is_refused(segments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(of_environment(False)) == []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"max_split_size_mb:64,{segments}")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert [reason.split()[0] for reason in of_environment(False)] == ["PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scope": "model"}, "scope is 'model'; choose one of iteration"),
        ({"on_refusal": "warn"}, "choose one of eager, error"),
        ({"warmup_steps": 1}, "at least 2"),
        ({"max_graphs": 0}, "at least 1"),
        ({"max_graphs": 2, "scope": "layer"}, "max_graphs=2 limits the forms of steps"),
    ],
)
def test_arguments(options: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        CUDAGraph(**options)


def test_other_strategies_have_no_such_steps() -> None:
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    runner = pl.Trainer(accelerator="cpu", devices=1, callbacks=[CUDAGraph()], **options)
    with pytest.raises(ConfigurationError, match="not of SingleDeviceStrategy"):
        runner.fit(Quiet(), [TokenBatch])


def test_passes_in_turns_cannot_be_recorded() -> None:
    strategy = MegatronStrategy(expert_parallel=2, pipeline=PipelineOptions(schedule="combined"))
    assert "in turns, in two threads" in next(
        of_whole_steps(pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"), ToyModule(), strategy)
    )
    assert "in turns, which scope='layer' cannot repeat" in next(of_parts(strategy, "layer", []))


def test_dispatchers_that_wait_inside_a_package_cannot_be_recorded() -> None:
    class Waiting(LocalDispatcher):
        pads = False

    layer = nn.ModuleDict({"attention": nn.Identity(), "dispatcher": Waiting()})
    strategy = MegatronStrategy()
    (found,) = of_parts(strategy, "layer", [[("layers.0", layer)]])
    assert "layers.0.dispatcher (Waiting) waits for numbers of rows; use scope='router'" in found
    assert not list(of_parts(strategy, "router", [[("layers.0.attention", layer["attention"])]]))
    lightning = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    with mock.patch.object(MegatronStrategy, "chunks", [layer]):
        (found,) = of_whole_steps(lightning, ToyModule(), strategy)
    assert "dispatcher (Waiting) waits" in found


def test_a_validation_batch_that_fails_ends_the_watch_of_attributes() -> None:
    callback, ended = CUDAGraph(), []
    callback._evaluating.callback(ended.append, True)
    callback.on_exception(mock.Mock(), mock.Mock(), RuntimeError())
    assert ended == [True]
