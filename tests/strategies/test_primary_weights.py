"""Weights that live as 8-bit values: every step is bit for bit that of a run that casts its weights itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from megalight import checkpoint
from megalight.callbacks import EMA
from megalight.errors import ConfigurationError, MegalightError
from megalight.ops.linear.low_precision import LowPrecision, Session, precision_of
from megalight.ops.quantize import quantize
from megalight.ops.quantize.recipes import recipe
from megalight.parallel.mesh import FAILED
from megalight.parallel.precision import LowPrecisionOptions
from megalight.parallel.source import Target
from megalight.plugins.precision import MegatronLowPrecision
from megalight.strategies import DataParallelOptions, MegatronStrategy
from tests.strategies.training import ADAM, BASE, SEED, WithData, gathered
from tests.support.environment import trainer
from tests.support.options import data_parallel
from tests.support.workers import run

CONFIG = replace(BASE, hidden_size=64, ffn_hidden_size=64, num_layers=3)
EIGHT_BITS = torch.float8_e4m3fn


class Watch(pl.Callback):
    """Every step's loss, and the quantized values and scales with which the next one will multiply."""

    reads_weights = True  # so that sharded quantized values are gathered for it

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.quantized: list[dict[str, tuple[Any, float]]] = []
        self.types: set[torch.dtype] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        trainer.strategy.sync_parameters()
        self.losses.append(float(trainer.strategy.report.loss))
        found = {}
        for name, parameter in pl_module.model.named_parameters():
            precision = precision_of(parameter)
            if precision is None:
                continue
            self.types.add(parameter.dtype)
            rows = precision._held(parameter)
            if rows is None:
                amax = precision.covers
                if amax is None:
                    amax = precision._amax(parameter.detach(), precision.recipe.weight, 1, precision.reduce_weight)
                rows = quantize(parameter.detach(), precision.recipe.weight, amax)
            found[name] = rows.data.view(torch.uint8).numpy().copy(), float(rows.scale)
        self.quantized.append(found)


def train(
    options: dict[str, Any],
    layout: dict[str, Any],
    *,
    precision: str = "32-true",
    level: str = "optim",
    steps: int = 3,
    load: str | None = None,
    save: str | None = None,
    ema: bool = False,
    clip: float | None = 0.5,
    reads: bool = True,
    window: int = 1,
) -> dict[str, Any]:
    plugin = MegatronLowPrecision(LowPrecisionOptions(emulate=True, first_layers=1, **options), precision)
    strategy = MegatronStrategy(data_parallel=DataParallelOptions(level=level), precision_plugin=plugin, **layout)
    module, watch = WithData(CONFIG, optimizer=ADAM, seed=SEED), Watch()
    watch.reads_weights = reads
    module.steps = 10
    runner = trainer(
        strategy,
        callbacks=[watch, *([EMA(0.5)] if ema else [])],
        precision=None,
        max_steps=steps,
        gradient_clip_val=clip,
        accumulate_grad_batches=window,
        use_distributed_sampler=False,
        **({"val_check_interval": steps, "limit_val_batches": 1} if ema else {"limit_val_batches": 0}),
    )
    runner.fit(module, ckpt_path=load, weights_only=False)
    if save is not None:
        runner.save_checkpoint(save)
    past = strategy.run.rank_state().get("magnitudes", {"names": (), "past": ()})
    return {
        "losses": watch.losses,
        "quantized": watch.quantized,
        "types": watch.types,
        "metrics": {name: float(value) for name, value in runner.callback_metrics.items()},
        "final": gathered(strategy, module),
        "past": dict(zip(past["names"], (steps.tolist() for steps in past["past"]), strict=True)),
        "memory": strategy.engine.memory()["parameters"] if strategy.engine else 0,
    }


def train_and_save_within(options: dict[str, Any], layout: dict[str, Any], path: str, clip: float | None = 0.5) -> None:
    """Saves while the weights are quantized."""

    class Save(pl.Callback):
        reads_weights = False

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(path)

    plugin = MegatronLowPrecision(LowPrecisionOptions(emulate=True, first_layers=1, **options), "bf16-mixed")
    module = WithData(CONFIG, optimizer=ADAM, seed=SEED)
    strategy = MegatronStrategy(precision_plugin=plugin, **layout)
    trainer(
        strategy, callbacks=[Save()], precision=None, max_steps=3, gradient_clip_val=clip,
        use_distributed_sampler=False, limit_val_batches=0,
    ).fit(module)  # fmt: skip


def assert_equal_runs(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert found["types"] == {EIGHT_BITS}
    assert EIGHT_BITS not in expected["types"]
    for ours, theirs in zip(found["quantized"], expected["quantized"], strict=True):
        assert ours
        assert ours.keys() == theirs.keys()
        for name, (quantized, scale) in theirs.items():
            assert np.array_equal(ours[name][0], quantized), name
            assert ours[name][1] == scale
    for name, value in expected["final"].items():
        assert np.array_equal(found["final"][name], value), name


LAYOUTS = [
    pytest.param(1, {"micro_batch_size": 2}, "optim", id="one"),
    pytest.param(2, {}, "optim", id="dp"),
    pytest.param(2, {}, "no_shard", id="whole-masters", marks=pytest.mark.full),
    pytest.param(2, {}, "optim_grads_params", id="sharded"),
    pytest.param(2, {"tensor_parallel": 2, "sequence_parallel": True}, "optim", id="tp", marks=pytest.mark.full),
    pytest.param(
        2,
        {"pipeline_parallel": 2, "pipeline_layout": "Ett|tL", "micro_batch_size": 1},
        "optim",
        id="pp",
        marks=pytest.mark.full,
    ),
    pytest.param(
        2,
        {"pipeline_parallel": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|t|t|L", "micro_batch_size": 1},
        "optim",
        id="vpp",
        marks=pytest.mark.full,
    ),
    pytest.param(4, {"tensor_parallel": 2}, "optim", id="dp-tp", marks=pytest.mark.full),
]


DELAYED = {"recipe": "delayed", "history": 2, "margin": 1}
RECIPES = [
    pytest.param({"recipe": "tensorwise"}, id="tensorwise"),
    pytest.param(DELAYED, id="delayed", marks=pytest.mark.full),
]


@pytest.mark.parametrize("options", RECIPES)
@pytest.mark.parametrize(("ranks", "layout", "level"), LAYOUTS)
def test_quantized_values_are_those_of_a_run_that_casts_its_weights(
    ranks: int, layout: dict[str, Any], level: str, options: dict[str, Any]
) -> None:
    agree = {"reduce_amax": True} if "tensor_parallel" in layout and options is not DELAYED else {}
    found, expected = (
        run(_train, ranks, {"primary_weights": primary, **options, **agree}, layout, level) for primary in (True, False)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal_runs(ours, theirs)


def _train(options: dict[str, Any], layout: dict[str, Any], level: str) -> dict[str, Any]:
    return train(options, layout, level=level, clip=None)  # buckets differ, and so does the last bit of a norm


def _mixed(
    options: dict[str, Any], reads: bool, layout: dict[str, Any], level: str = "optim", window: int = 1
) -> dict[str, Any]:
    steps = 4 if window == 1 else 3
    return train(
        options, layout, clip=None, precision="bf16-mixed", reads=reads, level=level, window=window, steps=steps
    )


ONE = {"micro_batch_size": 2}
UNASKED = [
    pytest.param(2, {}, {}, "optim", 1, id="usual"),
    pytest.param(2, {"margin": 1, "formats": "e4m3"}, {}, "optim", 1, id="margin", marks=pytest.mark.full),
    pytest.param(2, DELAYED, {}, "optim", 1, id="delayed"),
    pytest.param(1, {}, ONE, "optim", 1, id="one rank", marks=pytest.mark.full),
    pytest.param(1, DELAYED, ONE, "optim", 2, id="one rank, delayed, two batches", marks=pytest.mark.full),
    pytest.param(2, DELAYED, {}, "optim", 2, id="delayed, two batches", marks=pytest.mark.full),
    pytest.param(2, {}, {}, "no_shard", 1, id="no_shard", marks=pytest.mark.full),
    pytest.param(2, DELAYED, {}, "no_shard", 1, id="no_shard, delayed", marks=pytest.mark.full),
    pytest.param(2, DELAYED, {}, "optim_grads", 1, id="optim_grads, delayed", marks=pytest.mark.full),
    pytest.param(4, DELAYED, {}, "optim", 1, id="dp4, delayed", marks=pytest.mark.full),
    pytest.param(4, DELAYED, {"tensor_parallel": 2}, "optim", 1, id="dp2 tp2, delayed", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("ranks", "options", "layout", "level", "window"), UNASKED)
def test_weights_are_quantized_unasked_and_no_bit_changes(
    ranks: int, options: dict[str, Any], layout: dict[str, Any], level: str, window: int
) -> None:
    """Masters in float32, weights in bf16: casts are those of the rounded weights, which direct casts are not."""
    found, expected = (
        run(_mixed, ranks, {**options, **more}, False, layout, level, window)
        for more in ({}, {"primary_weights": False})
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal_runs(ours, theirs)
        assert ours["past"] == theirs["past"]


def test_quantized_values_that_were_asked_for_are_not_rounded_before() -> None:
    found, direct = (run(_mixed, 2, more, False, {})[0] for more in ({}, {"primary_weights": True}))
    assert direct["losses"] != found["losses"]


def test_who_reads_weights_between_steps_finds_weights() -> None:
    assert run(_mixed, 2, {}, True, {})[0]["types"] == {torch.bfloat16}


ROUNDED = {"rtol": 1e-9}
"""In float64, where nothing but the order of sums differs."""


@pytest.mark.full
@pytest.mark.parametrize("level", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, {}), (4, {}), (4, {"tensor_parallel": 2, "sequence_parallel": True})]
)
def test_quantized_values_by_past_steps_give_the_losses_of_one_device(
    ranks: int, layout: dict[str, Any], level: str
) -> None:
    primary = {**DELAYED, "primary_weights": True}
    expected = run(_double, 1, {**DELAYED, "primary_weights": False}, {}, "optim")[0]
    for found in run(_double, ranks, primary, layout, level):
        np.testing.assert_allclose(found["losses"], expected["losses"], **ROUNDED)
        assert found["types"] == {EIGHT_BITS}
        for name, value in expected["final"].items():
            np.testing.assert_allclose(found["final"][name], value, rtol=1e-7, atol=1e-9, err_msg=name)


def _double(options: dict[str, Any], layout: dict[str, Any], level: str) -> dict[str, Any]:
    layout = {"micro_batch_size": 1, **layout}
    return train(options, layout, level=level, precision="64-true", steps=5)


def test_sharded_weights_are_quantized_unasked() -> None:
    found, expected = (
        run(_types, 2, more, {"level": "optim_grads_params"}, {})[0] for more in ({}, {"primary_weights": False})
    )
    assert (found[0], expected[0]) == ({EIGHT_BITS}, {torch.bfloat16})
    assert found[1] == expected[1]


def _types(options: dict[str, Any], parallel: dict[str, Any], layout: dict[str, Any]) -> tuple[Any, list[float]]:
    """The dtypes of weights between steps, and the losses."""
    plugin = MegatronLowPrecision(LowPrecisionOptions(emulate=True, **options), "bf16-mixed")
    strategy = MegatronStrategy(data_parallel=data_parallel(**parallel), precision_plugin=plugin, **layout)
    types: set[torch.dtype] = set()
    losses: list[float] = []

    class Types(pl.Callback):
        reads_weights = False

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            losses.append(float(trainer.strategy.report.loss))
            types.update(p.dtype for p in pl_module.model.parameters() if precision_of(p) is not None)

    trainer(
        strategy, callbacks=[Types()], precision=None, max_steps=3, use_distributed_sampler=False, limit_val_batches=0
    ).fit(WithData(CONFIG, optimizer=ADAM, seed=SEED))
    return types, losses


@pytest.mark.parametrize(
    ("ranks", "options", "parallel", "layout"),
    [
        pytest.param(2, {"recipe": "rowwise"}, {}, {}, id="two sets of quantized values"),
        pytest.param(2, {}, {"optimizer_offload_fraction": 1.0}, {}, id="masters on the host"),
        pytest.param(2, {}, {"master_dtype": "bfloat16"}, {}, id="narrow masters"),
    ],
)
def test_where_quantized_values_would_not_do_weights_keep_their_dtype(
    ranks: int, options: dict[str, Any], parallel: dict[str, Any], layout: dict[str, Any]
) -> None:
    assert run(_types, ranks, options, parallel, layout)[0][0] == {torch.bfloat16}


def _resume(options: dict[str, Any], layout: dict[str, Any], load: str) -> dict[str, Any]:
    return train(options, layout, precision="bf16-mixed", steps=4, load=load)


@pytest.mark.parametrize("recipe", [{}, pytest.param(DELAYED, marks=pytest.mark.full)], ids=["tensorwise", "delayed"])
def test_checkpoints_hold_masters_and_resume_bit_for_bit(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Saved while weights are quantized; read by a run of another layout, and by one whose weights are bf16."""
    primary, usual = {**recipe, "primary_weights": True}, {**recipe, "primary_weights": False}
    path = str(tmp_path / "saved")
    run(train_and_save_within, 2, primary, {}, path)
    saved = checkpoint.open(path)
    name = "model.layers.1.mlp.down.weight"
    assert saved.tensors[name].dtype == "bfloat16"
    assert saved.tensors[f"optimizer.master.{name}"].dtype == "float32"
    undisturbed = run(_straight, 2, primary, {})[0]
    resumed = run(_resume, 2, primary, {}, path)[0]
    assert resumed["losses"] == undisturbed["losses"][2:]
    for key, value in undisturbed["final"].items():
        assert np.array_equal(resumed["final"][key], value), key
    whole = run(_resume, 1, primary, {"micro_batch_size": 2}, path)[0]
    np.testing.assert_allclose(whole["losses"], resumed["losses"], rtol=2e-3)
    bf16 = run(_resume, 1, usual, {"micro_batch_size": 2}, path)[0]
    if recipe:
        assert whole["past"]
        assert bf16["past"].keys() == whole["past"].keys()
    np.testing.assert_allclose(bf16["losses"], resumed["losses"], rtol=5e-3)


def _contents(options: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """All tensors that one rank saves in the middle of a run."""
    run(train_and_save_within, 1, options, ONE, str(path), None)  # as above: the last bit of a norm
    saved = checkpoint.open(str(path))
    found = {name: torch.empty(info.shape, dtype=getattr(torch, info.dtype)) for name, info in saved.tensors.items()}
    saved.fill([Target(name, tuple(t.shape), (0,) * t.ndim, t) for name, t in found.items()])
    return found


@pytest.mark.parametrize("recipe", [{}, pytest.param(DELAYED, marks=pytest.mark.full)], ids=["tensorwise", "delayed"])
def test_a_checkpoint_of_one_rank_does_not_tell_how_weights_were_held(recipe: dict[str, Any], tmp_path: Path) -> None:
    ours = _contents(recipe, tmp_path / "quantized")
    theirs = _contents({**recipe, "primary_weights": False}, tmp_path / "bf16")
    assert ours.keys() == theirs.keys()
    assert {tensor.dtype for name, tensor in ours.items() if name.startswith("model.")} == {torch.bfloat16}
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def _straight(options: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return train(options, layout, precision="bf16-mixed", steps=4)


def _average(options: dict[str, Any]) -> dict[str, Any]:
    return train(options, {}, ema=True, clip=None)


def test_moving_averages_are_swapped_in_and_out() -> None:
    found, expected = (run(_average, 2, {"primary_weights": primary})[0] for primary in (True, False))
    assert found["metrics"]["val_loss"] == expected["metrics"]["val_loss"]
    for name, value in expected["final"].items():
        assert np.array_equal(found["final"][name], value), name


def test_recipes_with_two_casts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'rowwise' needs two"):
        LowPrecisionOptions(recipe="rowwise", primary_weights=True)
    with pytest.raises(ConfigurationError, match="one quantized weight"):
        LowPrecision(recipe("mxfp8"), Session(), primary=True)


class Stop(pl.Callback):
    reads_weights = False

    def on_train_batch_end(self, *args: Any) -> None:
        raise RuntimeError("broken")


def _fit_again(layout: dict[str, Any]) -> list[str]:
    module, errors = WithData(CONFIG, optimizer=ADAM, seed=SEED), []
    for callbacks in ([Stop()], []):
        plugin = MegatronLowPrecision(LowPrecisionOptions(emulate=True, primary_weights=True), "32-true")
        runner = trainer(
            MegatronStrategy(precision_plugin=plugin, **layout),
            callbacks=callbacks,
            precision=None,
            max_steps=2,
            use_distributed_sampler=False,
            limit_val_batches=0,
        )
        try:
            runner.fit(module)
        except (RuntimeError, MegalightError) as error:
            errors.append(str(error))
    FAILED.clear()  # the process goes on with other tests
    return errors


def test_quantized_values_that_a_broken_run_left_are_refused() -> None:
    for first, second in run(_fit_again, 2, {}):
        assert first == "broken"
        assert "Load a checkpoint into a new module" in second


def test_one_rank_gives_weights_their_dtype_again_when_a_run_breaks() -> None:
    assert run(_fit_again, 1, ONE) == [["broken"]]


def test_one_rank_with_masters_in_the_memory_of_weights_keeps_them() -> None:
    assert run(_whole, 1, {}, ONE)[0]["types"] == {torch.float32}


def _whole(options: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return train(options, layout, reads=False, steps=1)
