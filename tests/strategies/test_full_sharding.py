"""Sharded gradients and parameters train the same model as one device."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megalight.callbacks import EMA, Adapters
from megalight.errors import ConfigurationError, LayoutError, MegalightError
from megalight.inference import ParallelGPT, generate
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.data_parallel import AdvancedDataParallelOptions, DataParallelOptions
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.precision import LowPrecisionOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.plugins.precision import MegatronLowPrecision, MegatronPrecision
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy
from tests.strategies.test_layout_changes import contents
from tests.strategies.training import (
    ADAM,
    CLIP,
    CONFIGS,
    SEED,
    STEPS,
    Gradients,
    Losses,
    WithData,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    fit,
    gathered,
    global_batch,
)
from tests.support.environment import trainer
from tests.support.workers import run

FULL, GRADS = "optim_grads_params", "optim_grads"
EACH = RecomputeOptions(granularity="full", num_layers=1)


class Uneven(WithData):
    """Three replicas: the first has two rows of each batch, and so two micro-batches; the others have one."""

    def train_dataloader(self) -> DataLoader[Any]:
        rank = self.trainer.strategy.mesh.rank("dp")
        batches = [global_batch(step) for step in range(self.steps)]
        shares = [batch.split(1)[1 + rank] if rank else batch.split(2)[0] for batch in batches]
        return DataLoader(shares, batch_size=None)  # type: ignore[arg-type]


@functools.cache
def _expected(config: str, layers: int, steps: int = STEPS) -> dict[str, Any]:
    return by_hand(replace(CONFIGS[config], num_layers=layers), steps)


def _trained(config: str, layers: int, level: str, options: dict[str, Any]) -> dict[str, Any]:
    gradients = Gradients()
    found = fit(
        replace(CONFIGS[config], num_layers=layers),
        options={"level": level, **options.pop("data_parallel", {})},
        extra_callbacks=[gradients],
        micro_batch_size=1,
        **options,
    )
    return {**found, "gradients": gradients.first}


WHOLE = {"prefetch": 2, "reduce_each_micro_batch": False}
CASES: dict[str, tuple[int, str, int, str, dict[str, Any]]] = {
    "two layers": (2, "gqa", 2, FULL, {}),
    "tied": (2, "tied", 3, FULL, {}),
    "gradients": (2, "gpt2", 5, GRADS, {}),
    "three ranks": (3, "gqa", 3, FULL, {"module_type": Uneven}),
    "whole gradients": (3, "gqa", 3, FULL, {"module_type": Uneven, "data_parallel": WHOLE}),
    "host": (2, "tied", 3, FULL, {"data_parallel": {"optimizer_offload_fraction": 0.5}}),
    "full recompute": (2, "gqa", 4, FULL, {"recompute": EACH}),
    "tp": (4, "mha", 3, FULL, {"tensor_parallel": 2, "sequence_parallel": True}),
    "hybrid": (4, "tied", 3, FULL, {"data_parallel": {"replicate": 2}}),
    "cp": (2, "gqa", 3, FULL, {"context_parallel": 2, "context": ContextOptions(kind="ring")}),
}


IN_THE_MATRIX = ("cp", "two layers", "whole gradients", "tp", "hybrid", "full recompute", "tied")
"""Whole test runs alone have these: test_full_sharding_matrix.py has the same axes, and other rows their parts."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case in IN_THE_MATRIX)) for case in CASES]
)
def test_equals_one_device(case: str) -> None:
    world, config, layers, level, options = CASES[case]
    expected = _expected(config, layers)
    for found in run(_trained, world, config, layers, level, options):
        assert_same_run(found, expected)
        assert_same_gradients(found["gradients"], expected["gradients"])


NORMS = RecomputeOptions(granularity="selective", modules=("attention_norm", "mlp_norm", "mlp.act", "attention.inner"))
BESIDE: dict[str, dict[str, Any]] = {
    "average": {"trainer_options": {"limit_val_batches": 1, "val_check_interval": 1}},
    **{f"eight bits {name}": {"trainer_options": {"precision": None}} for name in ("tensorwise", "delayed", "rowwise")},
    "adapters": {},
    "recompute": {"recompute": NORMS},
}


def _beside(what: str, level: str, **data_parallel: Any) -> dict[str, Any]:
    options = dict(BESIDE[what])
    callbacks: list[pl.Callback] = []
    if what == "average":
        callbacks = [EMA(0.8)]
    elif what == "adapters":
        callbacks = [Adapters(rank=3, targets=["layers.*"], alpha=6.0)]
    elif what.startswith("eight bits"):
        recipe = LowPrecisionOptions(recipe=what.split()[-1], emulate=True)
        options["precision_plugin"] = MegatronLowPrecision(recipe, "64-true")
    config = replace(CONFIGS["mha"], num_layers=3, hidden_size=64, ffn_hidden_size=64)
    sharding = {"level": level, **data_parallel}
    return fit(config, options=sharding, extra_callbacks=callbacks, micro_batch_size=1, **options)


def _with_each_level(what: str) -> list[dict[str, Any]]:
    levels = ("optim", FULL, GRADS, "no_shard") if "tensorwise" in what else ("optim", FULL)
    return [_beside(what, level) for level in levels]


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[pytest.mark.full] * what.endswith(("tensorwise", "rowwise", "recompute")))
        for what in BESIDE
    ],
)
def test_what_runs_beside_is_as_on_level_optim(what: str) -> None:
    """Averaged weights, products in 8 bits, adapters on frozen weights, partial recompute."""
    for expected, *others in run(_with_each_level, 2, what):
        for found in others:
            np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-9)
            assert ("val_loss" in found["metrics"]) == (what == "average")
            for name, value in expected["metrics"].items():
                assert found["metrics"][name] == pytest.approx(value, rel=1e-7), name
            for name, value in expected["final"].items():
                np.testing.assert_allclose(found["final"][name], value, rtol=1e-7, atol=1e-9, err_msg=name)


class Generates(pl.Callback):
    """Completes prompts with the trained model, which differ between the replicas, as do their lengths."""

    def __init__(self) -> None:
        self.found: list[list[int]] = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        prompts, count = ([[3, 4], [5]], 4) if strategy.mesh.rank("dp") else ([[7]], 2)
        strategy.sync_parameters()
        self.found = generate(ParallelGPT(strategy.parallel_model.eval()), prompts, max_new_tokens=count, temperature=0)


def _evaluates(level: str, precision: str) -> dict[str, Any]:
    generates = Generates()
    found = fit(
        replace(CONFIGS["gqa"], num_layers=3),
        options={"level": level},
        trainer_options={
            "precision": precision,
            "limit_val_batches": 2,
            "val_check_interval": 1,
            "gradient_clip_val": 1e6,
        },
        extra_callbacks=[generates],
    )
    return {**found, "generated": generates.found}


@pytest.mark.full
def test_half_precision_is_that_of_level_optim_with_validation_and_generation() -> None:
    """Bit for bit: two ranks' gradients of one micro-batch each have one sum, whatever is sharded."""
    expected = run(_evaluates, 2, "optim", "bf16-mixed")
    for level in (FULL, GRADS):
        for found, whole in zip(run(_evaluates, 2, level, "bf16-mixed"), expected, strict=True):
            assert found["losses"] == whole["losses"]
            assert found["metrics"]["val_loss"] == whole["metrics"]["val_loss"]
            np.testing.assert_allclose(found["norms"], whole["norms"], rtol=1e-6)
            assert found["generated"] == whole["generated"]
            for name, value in whole["final"].items():
                assert np.array_equal(found["final"][name], value), name


def _goes_on(path: str) -> tuple[list[float], dict[str, float], dict[str, Any], dict[str, Any]]:
    """Train sharded; evaluate and save the sharded model without an engine; train on at another level."""
    config = replace(CONFIGS["gqa"], num_layers=3)
    module = WithData(config, optimizer=ADAM, seed=SEED)
    module.steps = 2
    common: dict[str, Any] = {"gradient_clip_val": CLIP, "use_distributed_sampler": False}
    first = MegatronStrategy(data_parallel=DataParallelOptions(level=FULL))
    trainer(first, max_steps=2, limit_val_batches=0, **common).fit(module)
    trained = gathered(first, module)
    second = MegatronStrategy(data_parallel=DataParallelOptions(level=FULL))
    runner = trainer(second, **common)
    (seen,) = runner.validate(module, verbose=False)
    runner.save_checkpoint(path)
    third, losses = MegatronStrategy(data_parallel=DataParallelOptions(level="optim")), Losses()
    module.steps = 1
    trainer(third, max_steps=1, limit_val_batches=0, callbacks=[losses], **common).fit(module)
    return losses.losses, seen, trained, losses.initial


def test_a_sharded_model_is_evaluated_saved_and_trained_on_at_another_level(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    expected = _expected("gqa", 3, 2)
    for losses, seen, trained, initial in run(_goes_on, 2, path):
        for name, value in expected["final"].items():
            assert np.linalg.norm(trained[name] - value) <= 1e-9 * max(float(np.linalg.norm(value)), 1e-3)
            assert np.array_equal(initial[name], trained[name]), "the second run begins where the first one ended"
        assert seen["val_loss"] > 0
        assert losses
    saved = contents(path)
    for name, value in expected["final"].items():
        assert np.linalg.norm(saved[name].numpy() - value) <= 1e-9 * max(float(np.linalg.norm(value)), 1e-3)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Plain(pl.LightningModule):
    """A plain LightningModule, with an ordinary optimizer and no plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = torch.nn.Sequential(*[Block() for _ in range(3)])
        self.head = torch.nn.Linear(6, 1)
        self.seen: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.head(self.body(batch)) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return DataLoader(data, batch_size=4)  # type: ignore[arg-type]


def _plain(options: dict[str, Any]) -> list[float]:
    module = Plain()
    strategy = MegatronFSDPStrategy(**options)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "limit_val_batches": 0}
    trainer(strategy, max_epochs=2, max_steps=-1, **options).fit(module)
    assert strategy.parallel_model is not None
    with strategy.parallel_model.full_parameters():
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).tolist()


def test_a_plain_module_without_a_plan() -> None:
    """Two batches add up to a step."""
    whole = run(_plain, 2, {"sharding_strategy": "NO_SHARD"})
    for options in ({}, {"sharding_strategy": "SHARD_GRAD_OP", "reduce_scatter_with_fp32_accumulation": True}):
        np.testing.assert_allclose(run(_plain, 2, options), whole, rtol=1e-12)


class Penalized(Plain):
    """The norm of the loss's gradient by the inputs is a part of the loss."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch.requires_grad_(), index)
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        return loss + slope.square().sum()


def _penalized(options: dict[str, Any]) -> list[float] | str:
    module, strategy = Penalized(), MegatronFSDPStrategy(**options)
    try:
        trainer(strategy, max_epochs=1, max_steps=-1, limit_val_batches=0).fit(module)
    except MegalightError as error:
        return str(error)
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).tolist()


def test_gradients_of_gradients_are_right_or_refused() -> None:
    refused = run(_penalized, 2, {})
    assert all("create_graph=True reached Block" in str(told) and "SHARD_GRAD_OP" in str(told) for told in refused)
    whole, grads = (run(_penalized, 2, {"sharding_strategy": name}) for name in ("NO_SHARD", "SHARD_GRAD_OP"))
    np.testing.assert_allclose(grads, whole, rtol=1e-9)


class Spoilt(Plain):
    """The second rank has a bad batch."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        bad = index == 1 and self.trainer.global_rank == 1
        return super().training_step(batch * float("inf") if bad else batch, index)


def _stopped() -> tuple[str, bool]:
    module = Spoilt()
    strategy = MegatronFSDPStrategy(data_parallel=DataParallelOptions(check_for_nan=True))
    with pytest.raises(MegalightError) as caught:
        trainer(strategy, max_epochs=1, max_steps=-1, limit_val_batches=0).fit(module)
    assert strategy.parallel_model is not None
    with strategy.parallel_model.full_parameters():
        good = all(bool(p.isfinite().all()) for p in module.parameters())
    scaled = MegatronFSDPStrategy(
        data_parallel=DataParallelOptions(check_for_nan=True), precision_plugin=MegatronPrecision("16-mixed")
    )
    with pytest.raises(ConfigurationError, match="check_for_nan=True with precision='16-mixed'"):
        trainer(scaled, precision=None).fit(Plain())
    return str(caught.value), good


def test_a_bad_gradient_on_one_rank_stops_all_of_them() -> None:
    (one, good), (other, also) = run(_stopped, 2)
    assert one == other
    assert "are NaN or infinite" in one
    assert "body.0.norm.bias" in one
    assert good
    assert also


def test_arguments_read_like_those_of_lightning() -> None:
    assert MegatronFSDPStrategy().data_parallel == DataParallelOptions(level=FULL)
    given = DataParallelOptions(gradient_dtype="bfloat16")
    strategy = MegatronFSDPStrategy("SHARD_GRAD_OP", ["Block"], True, data_parallel=given, tensor_parallel=2)
    assert strategy.layout.tensor_parallel == 2
    assert strategy.data_parallel == DataParallelOptions(
        level=GRADS, units=("Block",), reduce_scatter_with_fp32_accumulation=True, gradient_dtype="bfloat16"
    )
    both = DataParallelOptions(advanced=AdvancedDataParallelOptions(replicate_optimizer=False))
    assert MegatronFSDPStrategy("HYBRID_SHARD", device_mesh=(2, 2), data_parallel=both).data_parallel.replicate == 2
    assert isinstance(pl.Trainer(strategy="megatron_fsdp", accelerator="cpu").strategy, MegatronFSDPStrategy)
    for options, message in (
        ({"sharding_strategy": "FULL"}, "must be one of FULL_SHARD, HYBRID_SHARD, SHARD_GRAD_OP, NO_SHARD"),
        ({"auto_wrap_policy": print}, r"is a function; pass the classes to shard"),
        ({"data_parallel": DataParallelOptions(level="no_shard")}, "has an argument for it: sharding_strategy"),
        ({"sharding_strategy": "HYBRID_SHARD"}, r"needs device_mesh=\(number of groups"),
        ({"device_mesh": (2, 2)}, "HYBRID_SHARD needs"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": 4}, "device_mesh=4; pass two sizes"),
        (
            {"cpu_offload": True},
            r"no argument 'cpu_offload'. Instead: data_parallel=DataParallelOptions\(optimizer_offload",
        ),
        ({"timeout": 5}, "no argument 'timeout'. Instead: timeout_seconds"),
        ({"tensor_paralel": 2}, "no argument 'tensor_paralel'.*Did you mean 'tensor_parallel'"),
        (
            {"pipeline": PipelineOptions(schedule="combined")},
            "level='optim_grads_params' with pipeline.schedule='combined'",
        ),
        ({"sharding_strategy": "NO_SHARD", "reduce_scatter_with_fp32_accumulation": True}, "'no_shard' all-reduces"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            MegatronFSDPStrategy(**options)  # type: ignore[arg-type]


def _groups() -> None:
    fit(
        replace(CONFIGS["gqa"], num_layers=4),
        options={"level": FULL},
        recompute=RecomputeOptions(granularity="full", method="uniform", num_layers=2),
    )


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"device_mesh=\(2, 2\) describes 4 data-parallel ranks, and there are 2"):
        MegatronFSDPStrategy("HYBRID_SHARD", device_mesh=(2, 2)).grid(2)
    with pytest.raises(ConfigurationError, match=r"'optim_grads_params' with pipeline.schedule='combined': .* 'optim'"):
        MegatronStrategy(pipeline=PipelineOptions(schedule="combined"), data_parallel=DataParallelOptions(level=FULL))
    with pytest.raises(ConfigurationError, match=r"level='zero3'; it must be one of no_shard, optim, optim_grads"):
        DataParallelOptions(level="zero3")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"Set recompute\.num_layers=1, or method='block'"):
        run(_groups, 2)


SEEN_IN = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_sanity_check_end",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_start",
    "on_validation_epoch_end",
    "on_validation_start",
)


class Sees(pl.Callback):
    """Reads all weights in every hook, and writes to them after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, np.ndarray[Any, Any]]] = []

    def note(self, name: str, module: pl.LightningModule) -> None:
        self.seen.append((name, np.concatenate([p.detach().numpy().ravel().copy() for p in module.parameters()])))


def _hook(name: str) -> Any:
    def hook(self: Sees, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.note(name, module)
        if name == "on_train_batch_end" and args[-1] % 2:  # a step has ended
            with torch.no_grad():
                for number, parameter in enumerate(module.parameters()):
                    if number % 2:
                        parameter.mul_(0.99)
                    else:
                        parameter.data = parameter.data * 0.99
            trainer.strategy.engine.refresh_masters()

    return hook


for _name in SEEN_IN:
    setattr(Sees, _name, _hook(_name))


class Glances(pl.Callback):
    """Says that it reads no weights, and does: it finds the right values or NaN, in its own step as well."""

    reads_weights = False

    def __init__(self) -> None:
        self.seen: list[tuple[str, np.ndarray[Any, Any]]] = []

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: torch.Tensor) -> None:
        Sees.note(self, "on_before_backward", module)  # type: ignore[arg-type]

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        trainer.strategy.sync_parameters()  # the head is not sharded: its gather may not have ended
        Sees.note(self, "on_train_batch_end", module)  # type: ignore[arg-type]


class Validates(Plain):
    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.head(self.body(batch))

    val_dataloader = Plain.train_dataloader


def _seen(level: str, kind: type[Any]) -> tuple[list[tuple[str, np.ndarray[Any, Any]]], list[str], list[float]]:
    callback, module = kind(), Validates()
    strategy = MegatronStrategy(data_parallel=DataParallelOptions(level=level))  # type: ignore[arg-type]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megalight.strategies.megatron")
    logger.addHandler(handler)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "num_sanity_val_steps": 1, "limit_val_batches": 1}
    try:
        trainer(strategy, max_epochs=2, max_steps=-1, callbacks=[callback], **options).fit(module)
    finally:
        logger.removeHandler(handler)
    assert strategy.parallel_model is not None
    with strategy.parallel_model.full_parameters():
        final = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).tolist()
    return callback.seen, [text for text in said if "runs between steps" in text], final


def test_hooks_see_whole_weights_and_may_write_to_them() -> None:
    """Also between batches that add up to one step; the log says what it costs."""
    whole, full = run(_seen, 2, "optim", Sees), run(_seen, 2, FULL, Sees)
    assert {name for name, _ in full[0][0]} == set(SEEN_IN)
    assert [len(said) for _, said, _ in full] == [1, 0]
    for (found, _, final), (expected, said, last) in zip(full, whole, strict=True):
        assert not said
        assert len(found) == len(expected)
        for (name, values), (same, others) in zip(found, expected, strict=True):
            assert name == same
            np.testing.assert_allclose(values, others, rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(final, last, rtol=1e-12)


def test_released_weights_read_nan_and_never_those_of_another_layer() -> None:
    whole, full = run(_seen, 2, "optim", Glances), run(_seen, 2, FULL, Glances)
    for (found, said, final), (expected, _, last) in zip(full, whole, strict=True):
        assert not said
        np.testing.assert_allclose(final, last, rtol=1e-12)
        absent = 0
        for (name, values), (_, others) in zip(found, expected, strict=True):
            there = ~np.isnan(values)
            np.testing.assert_allclose(values[there], others[there], rtol=1e-12, err_msg=name)
            absent += (~there).sum()
        assert absent
