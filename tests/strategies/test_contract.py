"""The contract of MegalightModule: chunks, auxiliary losses, metrics, other strategies, precision of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.errors import ConfigurationError
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.model import GPT
from megalight.models.gpt.module import GPTModule
from megalight.models.gpt.presets import PRESETS
from megalight.models.module import Carry
from megalight.models.stored import open_model
from megalight.strategies import DataParallelOptions, MegatronStrategy, load_weights
from megalight.types import Loss, TokenBatch
from tests.strategies.toy import Kept, ToyModule
from tests.strategies.training import (
    ADAM,
    CLIP,
    CONFIGS,
    SEED,
    Losses,
    Shares,
    WithData,
    by_hand,
    gathered,
    global_batch,
    whole,
)
from tests.support.environment import trainer
from tests.support.workers import run


class Auxiliary(WithData):
    """An auxiliary loss that is a mean already, and a metric."""

    def loss_step(self, carry: Carry, batch: TokenBatch) -> Loss:
        loss = super().loss_step(carry, batch)
        assert isinstance(self.model, GPT)
        assert self.model.head is not None
        weight = self.model.head.output_layer.weight
        balance = weight.square().mean() * (1 + batch.tokens.double().mean() / 100)
        length = torch.tensor(float(batch.tokens.numel()))
        return Loss(loss.sum, {"balance": balance}, {"token": (batch.tokens.sum(), length)})


def _auxiliary(micro: int | None, accumulate: int) -> dict[str, Any]:
    module = Auxiliary(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    module.steps = 3 * accumulate
    logged: list[dict[str, float]] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    runner = trainer(
        MegatronStrategy(micro_batch_size=micro),
        callbacks=[Keep()],
        use_distributed_sampler=False,
        limit_val_batches=0,
        accumulate_grad_batches=accumulate,
    )
    runner.fit(module)
    assert runner.global_step == 3
    return {"logged": logged, "final": {n: p.detach().numpy().copy() for n, p in module.model.named_parameters()}}  # type: ignore[union-attr]


def auxiliary_by_hand(accumulate: int) -> dict[str, Any]:
    """The objective of a global batch: the mean over its tokens, plus the mean of the auxiliary loss over samples."""
    module = Auxiliary(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    module.configure_model()
    model = module.model
    assert isinstance(model, GPT)
    model.double()
    optimizer, _ = ADAM.build(model.named_parameters(), 3)
    logged = []
    for step in range(3):
        optimizer.zero_grad()
        for part in range(accumulate):
            batch = global_batch(step * accumulate + part)
            loss = module.loss_step(module.forward_step(model, batch), batch)
            mean = loss.sum / batch.loss_mask.sum()
            ((mean + loss.aux_losses["balance"]) / accumulate).backward()
            token = float(batch.tokens.double().mean())
            logged.append((float(mean.detach()), float(loss.aux_losses["balance"].detach()), token))
        optimizer.step()
    return {"logged": logged, "final": {n: p.detach().numpy() for n, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("ranks", "micro", "accumulate"),
    [pytest.param(1, None, 1, marks=pytest.mark.full), (2, 1, 1), (2, None, 2), (1, 2, 3)],
)
def test_auxiliary_losses_and_metrics_do_not_depend_on_the_layout(
    ranks: int, micro: int | None, accumulate: int
) -> None:
    expected = auxiliary_by_hand(accumulate)
    for found in run(_auxiliary, ranks, micro, accumulate):
        for mine, theirs in zip(found["logged"], expected["logged"], strict=True):
            values = mine["train_loss"], mine["train_balance"], mine["train_token"]
            assert values == pytest.approx(theirs, rel=1e-9)
        for name, value in expected["final"].items():
            assert np.linalg.norm(found["final"][name] - value) <= 1e-9 * np.linalg.norm(value), name


class OwnStep(WithData):
    """Writes its training_step itself."""

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


def _own_step() -> list[float]:
    losses = Losses()
    options: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0, "gradient_clip_val": CLIP}
    trainer(MegatronStrategy(), callbacks=[losses], **options).fit(OwnStep(CONFIGS["gqa"], optimizer=ADAM, seed=SEED))
    return losses.losses


def test_a_module_may_write_its_own_training_step() -> None:
    assert run(_own_step, 1)[0] == pytest.approx(by_hand(CONFIGS["gqa"], 3)["losses"], rel=1e-9)


def rows(steps: int) -> DataLoader[Any]:
    return DataLoader(Shares(steps, 1, 0), batch_size=None)


def _fit_once(strategy: Any, precision: str) -> dict[str, Any]:
    module = Auxiliary(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    logged: list[float] = []

    class Keep(pl.Callback):
        initial: dict[str, Any]

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            assert isinstance(module.model, nn.Module)
            self.initial = {} if precision == "bf16-true" else whole(module.model)  # numpy has no bfloat16

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            logged.append(float(trainer.callback_metrics["train_loss"]))

    keep = Keep()
    if strategy == "auto":
        runner = pl.Trainer(
            strategy="auto", accelerator="cpu", devices=1, precision=precision, max_steps=3, logger=False,  # type: ignore[arg-type]
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[keep],
        )  # fmt: skip
        module.train_dataloader = lambda: rows(3)  # type: ignore[assignment,method-assign]
        module.val_dataloader = lambda: rows(2)  # type: ignore[assignment,method-assign]
    else:
        runner = trainer(MegatronStrategy(), callbacks=[keep], use_distributed_sampler=False, precision=precision)
    runner.fit(module)
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    return {"initial": keep.initial, "losses": logged, "metrics": metrics}


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("64-true", 1e-6), ("bf16-true", 1e-2)])
def test_the_module_runs_under_lightnings_own_strategy(precision: str, tolerance: float) -> None:
    ours, theirs = run(_fit_once, 1, "megatron", precision)[0], run(_fit_once, 1, "auto", precision)[0]
    for name, value in theirs["initial"].items():
        np.testing.assert_allclose(ours["initial"][name], value, rtol=0.0 if precision == "32-true" else tolerance)
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=tolerance)
    assert theirs["metrics"] == pytest.approx(ours["metrics"], rel=tolerance)


def _masters(precision: str, level: str, dtype: str) -> None:
    """Before the first step, masters are the float32 draws and parameters these rounded."""
    draws: dict[str, Tensor] = {}
    module = WithData(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    module.configure_model()
    assert module.model is not None
    draws = {name: p.detach().float() for name, p in module.model.named_parameters()}
    found = 0

    def check(runner: pl.Trainer, module: Any) -> None:
        nonlocal found
        strategy: Any = runner.strategy
        for bucket in strategy.engine.buckets:
            assert bucket.shard.master.dtype == torch.float32
            for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
                assert info.parameter.dtype == getattr(torch, dtype)
                assert torch.equal(info.parameter, draws[info.name].to(info.parameter.dtype))
                low, high = max(bucket.shard.start, slot.start), min(bucket.shard.stop, slot.stop)
                if low < high:
                    mine = bucket.shard.master[low - bucket.shard.start : high - bucket.shard.start]
                    assert torch.equal(mine, draws[info.name].reshape(-1)[low - slot.start : high - slot.start])
                    found += high - low

    strategy = MegatronStrategy(data_parallel=DataParallelOptions(level=level))  # type: ignore[arg-type]
    options: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0, "precision": precision}
    fresh = WithData(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    trainer(strategy, callbacks=[OnStart(check)], max_steps=1, **options).fit(fresh)
    assert found


class OnStart(pl.Callback):
    def __init__(self, act: Callable[[pl.Trainer, Any], None]) -> None:
        self.act = act

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.act(trainer, pl_module)


@pytest.mark.parametrize(
    ("precision", "level", "dtype"),
    [("bf16-true", "optim", "bfloat16"), ("bf16-mixed", "no_shard", "bfloat16"), ("32-true", "optim", "float32")],
)
def test_masters_begin_as_the_float32_draws(precision: str, level: str, dtype: str) -> None:
    run(_masters, 2, precision, level, dtype)


def _second_fit_keeps_weights() -> tuple[float, float]:
    module = WithData(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    runner = trainer(MegatronStrategy(), use_distributed_sampler=False, precision="bf16-true")
    runner.fit(module)
    before = runner.validate(module, verbose=False)[0]["val_loss"]
    runner.fit(module)  # all steps are done: this sets up and ends
    return before, runner.validate(module, verbose=False)[0]["val_loss"]


def test_a_second_fit_does_not_draw_weights_again() -> None:
    before, after = run(_second_fit_keeps_weights, 1)[0]
    assert after == pytest.approx(before, rel=1e-6)


class Tilted(ToyModule):
    """An auxiliary loss with its own count, and replicas with unequal numbers of rows in large micro-batches."""

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        error = carry["hidden"] - batch["y"]
        return Loss(error.square().sum(), {"tilt": carry["hidden"][:, 0].exp().sum()})

    def aux_loss_counts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"tilt": torch.tensor(float(len(batch["x"])))}


def _tilted(micro: int | None, layout: dict[str, int]) -> tuple[list[dict[str, float]], list[list[float]]]:
    module = Tilted(rows=5)
    kept = Kept()
    how = MegatronStrategy(micro_batch_size=micro, **layout)  # type: ignore[arg-type]
    trainer(how, callbacks=[kept], use_distributed_sampler=False, limit_val_batches=0).fit(module)
    return kept.seen, [parameter.detach().reshape(-1).tolist() for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("ranks", "micro", "layout"), [(2, None, {}), (2, 2, {}), (2, 2, {"pipeline_parallel": 2}), (1, 3, {})]
)
def test_auxiliary_losses_with_counts_are_means_over_the_global_batch(
    ranks: int, micro: int | None, layout: dict[str, int]
) -> None:
    ((seen, weights),) = run(_tilted, 1, None, {})
    for found, found_weights in run(_tilted, ranks, micro, layout):
        assert [row["train_tilt"] for row in found] == pytest.approx([row["train_tilt"] for row in seen], rel=1e-9)
        if not layout:
            for one, other in zip(found_weights, weights, strict=True):
                assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def _by_hand() -> None:
    strategy = MegatronStrategy()
    module = WithData(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    trainer(strategy, max_steps=1, limit_val_batches=0).fit(module)
    batch = global_batch(0)
    loss = module.training_step(batch, 0)
    assert module.model is not None
    each = module.model(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1)).losses
    mask = batch.loss_mask.reshape(-1)
    torch.testing.assert_close(loss, (each * mask).sum() / mask.sum())


def _stage_by_hand() -> None:
    module = WithData(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    trainer(MegatronStrategy(pipeline_parallel=2), max_steps=1, limit_val_batches=0).fit(module)
    with pytest.raises(ConfigurationError, match=r"part of the model only.*load_weights"):
        module.training_step(global_batch(0), 0)


def test_a_training_step_by_hand_after_fit() -> None:
    run(_by_hand, 1)
    run(_stage_by_hand, 2)


class Clips(WithData):
    """Clips with torch's function by hand, or with the method of Lightning."""

    by_hand = True

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.by_hand:
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        else:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def _clips(by_hand: bool, options: dict[str, Any]) -> tuple[str, float]:
    module = Clips(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    module.by_hand = by_hand
    how = MegatronStrategy(
        **{**options, "data_parallel": DataParallelOptions(level=options.get("data_parallel", "no_shard"))}
    )
    try:
        trainer(how, use_distributed_sampler=False, limit_val_batches=0).fit(module)
    except ConfigurationError as error:
        return str(error), 0.0
    # After `fit`, the user's own loop may clip.
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    return "", sum(float(np.square(value).sum()) for value in gathered(how, module).values())


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        pytest.param({"data_parallel": "no_shard"}, True, marks=pytest.mark.full),
        ({"context_parallel": 2}, True),
        pytest.param({"data_parallel": "optim"}, False, marks=pytest.mark.full),
        ({"data_parallel": "optim_grads_params"}, False),
        ({"tensor_parallel": 2}, False),
        pytest.param({"pipeline_parallel": 2, "micro_batch_size": 1}, False, marks=pytest.mark.full),
    ],
    ids=["no_shard", "cp", "optim", "params", "tp", "pp"],
)
def test_clipping_by_hand_is_refused_where_a_rank_has_a_part_of_the_gradients(
    options: dict[str, Any], whole: bool
) -> None:
    # With one device, torch's function clips as the strategy does.
    ((_, expected),) = run(_clips, 1, True, {})
    for told, found in run(_clips, 2, True, options):
        if whole:
            assert told == ""
            assert found == pytest.approx(expected, rel=1e-9)
        else:
            assert told.startswith("torch.nn.utils.clip_grad_norm_ cannot clip under MegatronStrategy")
    for told, found in run(_clips, 2, False, options):
        assert told == ""
        assert found == pytest.approx(expected, rel=1e-9)


class OwnEntries(WithData):
    """Saves an entry of its own, and calls neither hook of its base."""

    read: int | None = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = 5

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read = checkpoint["own"]


def _own_entries(folder: str) -> tuple[int | None, int, list[str]]:
    options: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0}
    first, second = (OwnEntries(CONFIGS["gqa"], optimizer=ADAM, seed=SEED) for _ in range(2))
    runner = trainer(MegatronStrategy(), max_steps=1, **options)
    runner.fit(first)
    runner.save_checkpoint(f"{folder}/own.ckpt")
    runner = trainer(MegatronStrategy(), max_steps=2, **options)
    runner.fit(second, ckpt_path=f"{folder}/own.ckpt")
    loaded = GPTModule(weights=f"{folder}/own.ckpt")  # by the configuration that it holds
    load_weights(loaded, f"{folder}/own.ckpt")
    return second.read, runner.global_step, [name for name, _ in loaded.named_parameters()]


def test_own_entries_leave_the_description_of_the_model(tmp_path: Path) -> None:
    read, steps, names = run(_own_entries, 1, str(tmp_path))[0]
    assert (read, steps) == (5, 2)
    assert "model.head.output_layer.weight" in names


@dataclass(frozen=True)
class OwnConfig(GPTConfig):
    """The configuration of a subclass, with a setting of its loss."""

    factor: float = 1.0


class OwnBatch:
    """A batch that is cut as the error for one without ``context_share`` says."""

    def __init__(self, rows: TokenBatch) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def context_share(self, rank: int, size: int, multiple: int = 1) -> OwnBatch:
        return OwnBatch(self.rows.context_share(rank, size, multiple))


class OwnLoss(WithData):
    """A loss, a configuration and batches of its own."""

    config: Any

    def __init__(self, config: OwnConfig | str | None = None, **options: Any) -> None:
        super().__init__(config, **options)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return OwnBatch(batch)

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        return super().forward_step(model, batch.rows, carry)

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        return Loss(super().loss_step(carry, batch.rows).sum * self.config.factor)

    def loss_tokens(self, batch: Any) -> Tensor:
        return super().loss_tokens(batch.rows)

    def aux_loss_counts(self, batch: Any) -> dict[str, Tensor]:
        return super().aux_loss_counts(batch.rows)


def _own_loss(folder: str, options: dict[str, Any]) -> list[float]:
    config = OwnConfig(**{**vars(CONFIGS["gqa"]), "factor": 2.0})
    losses = []
    for given, weights in ((config, None), (None, f"{folder}/own.ckpt")):
        runner = trainer(MegatronStrategy(**options), max_steps=2, use_distributed_sampler=False, limit_val_batches=0)
        runner.fit(OwnLoss(given, optimizer=ADAM, seed=SEED, weights=weights))
        losses.append(float(runner.callback_metrics["train_loss"]))
        runner.save_checkpoint(f"{folder}/own.ckpt")
    with pytest.raises(ConfigurationError, match=r"own.ckpt: unknown key 'factor'.*config: OwnConfig \| None = None"):
        WithData(weights=f"{folder}/own.ckpt")
    with pytest.raises(
        ConfigurationError, match=r"GPTConfig cannot take .*own.ckpt: unknown key 'factor'.* that module"
    ):
        open_model(f"{folder}/own.ckpt")
    assert OwnLoss("gpt2_small").config == OwnConfig(**vars(PRESETS["gpt2_small"]))
    assert OwnLoss(config.to_dict()).config == config  # type: ignore[arg-type]
    return losses


def test_a_subclass_has_its_own_loss_configuration_and_batches(tmp_path: Path) -> None:
    (expected,) = run(_own_loss, 1, str(tmp_path / "one"), {})
    assert expected[1] < expected[0]
    for found in run(_own_loss, 2, str(tmp_path / "two"), {"context_parallel": 2}):
        assert found == pytest.approx(expected, rel=1e-9)


class Outside(WithData):
    """A parameter that is not one of the model."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.temperature = nn.Parameter(torch.ones(()))


def _outside(train: bool) -> str:
    module = Outside(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    module.temperature.requires_grad_(train)
    if not train:
        module.configure_optimizers = lambda: torch.optim.SGD(module.model.parameters(), lr=0.1)  # type: ignore[method-assign, union-attr]
    try:
        trainer(MegatronStrategy(), max_steps=1, use_distributed_sampler=False, limit_val_batches=0).fit(module)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_parameters_outside_of_the_model_are_refused_by_name() -> None:
    (told,) = run(_outside, 1, True)
    assert told.startswith("the optimizer was given temperature of Outside, outside of its model: only GPT is divided")
    assert "in build_model, or freeze them" in told
    assert run(_outside, 1, False) == [""]


class Local(WithData):
    """Logs a value that each rank has for itself."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("own", float(self.global_rank))


def _local(folder: str) -> tuple[str, float]:
    best = ModelCheckpoint(folder, "{step}-{own:.0f}", every_n_train_steps=1)
    runner = trainer(MegatronStrategy(), callbacks=[best], enable_checkpointing=True, use_distributed_sampler=False)
    runner.fit(Local(CONFIGS["gqa"], optimizer=ADAM, seed=SEED))
    return Path(best.best_model_path).name, runner.validate(ckpt_path="best", verbose=False)[0]["val_loss"]


def test_the_best_checkpoint_is_that_of_rank_0(tmp_path: Path) -> None:
    (first, loss), (second, other) = run(_local, 2, str(tmp_path))
    assert (first, second) == ("step=3-own=0.ckpt", "step=3-own=1.ckpt")
    assert loss == other
