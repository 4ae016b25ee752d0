"""bfloat16 main weights in both strategies: as one device trains them, and resumed from float32 ones and back."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.callbacks import EMA
from megalight.checkpoint.run import TrainingRun
from megalight.checkpoint.sources import MASTER
from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.random import RandomStreams
from megalight.strategies import CheckpointOptions, MegatronFSDPStrategy, MegatronStrategy
from tests.strategies.training import ADAM, BASE, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

STEPS = 3


class Seen(pl.Callback):
    """Masters and Adam's moments as training begins."""

    def __init__(self) -> None:
        self.masters: list[Tensor] = []
        self.moments: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        states = strategy.optimizers[0].state
        self.masters = [shard.master.detach().clone() for shard in strategy.engine.shards]
        self.moments = [states[shard.master].get("exp_avg", torch.zeros(0)).clone() for shard in strategy.engine.shards]


def _fit(strategy: Any, steps: int, callbacks: Any = (), ckpt_path: str | None = None) -> tuple[Any, Any]:
    module = WithData(BASE, optimizer=ADAM, seed=SEED)
    module.steps = 4
    options: dict[str, Any] = {"max_steps": steps, "limit_val_batches": 0, "use_distributed_sampler": False}
    runner = trainer(strategy, callbacks=list(callbacks), precision="bf16-true", **options)
    runner.fit(module, ckpt_path=ckpt_path)
    return runner, module


def _weights(strategy: Any, module: Any) -> dict[str, list[float]]:
    strategy.sync_parameters()
    with strategy.parallel_model.full_parameters():
        return {name: p.detach().float().flatten().tolist() for name, p in module.model.named_parameters()}


def _trained(kind: str, level: Any, masters: Any) -> Any:
    shared = DataParallelOptions(master_dtype=masters, **({} if kind == "fsdp" else {"level": level}))
    # As many rows per micro-batch on one device as on two: then equal sums, bit for bit.
    options: Any = {"micro_batch_size": 2, "data_parallel": shared}
    strategy = MegatronFSDPStrategy(**options) if kind == "fsdp" else MegatronStrategy(**options)
    _, module = _fit(strategy, STEPS)
    dtypes = {str(shard.master.dtype) for shard in strategy.engine.shards}
    return _weights(strategy, module), dtypes, strategy.engine.memory()


@pytest.mark.parametrize(
    ("kind", "level"),
    [("megatron", "no_shard"), ("megatron", "optim"), ("megatron", "optim_grads_params"), ("fsdp", None)],
)
def test_ranks_train_as_one_device(kind: str, level: str | None) -> None:
    expected, dtypes, _ = run(_trained, 1, "megatron", "no_shard", "bfloat16")[0]
    assert dtypes == {"torch.bfloat16"}
    for found, here, memory in run(_trained, 2, kind, level, "bfloat16"):
        assert here == dtypes
        assert memory["masters"] == 0
        for name, value in expected.items():
            assert found[name] == value, name
    wide, _, memory = run(_trained, 1, "megatron", "no_shard", None)[0]
    assert memory["masters"] > 0
    assert wide != expected, "float32 masters keep what is rounded away here"


def _passed_on(folder: str, before: Any, after: Any, scheme: str) -> Any:
    """Two steps with one kind of masters, then two with another."""
    found: list[Any] = []
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    for steps, masters in ((2, before), (4, after)):
        seen = Seen()
        options = DataParallelOptions(master_dtype=masters)
        strategy = MegatronStrategy(
            micro_batch_size=2, data_parallel=options, checkpoints=CheckpointOptions(format=scheme)
        )
        log = logging.getLogger("megalight.checkpoint.run")
        level = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            runner, _ = _fit(strategy, steps, [seen], None if steps == 2 else folder)
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        if steps == 2:
            states = strategy.optimizers[0].state
            found += [[shard.master.detach().clone() for shard in strategy.engine.shards]]
            found += [[states[shard.master]["exp_avg"].clone() for shard in strategy.engine.shards]]
            runner.save_checkpoint(folder)
    same = [
        torch.equal(mine, other.to(mine.dtype)) and mine.dtype == (torch.bfloat16 if after else torch.float32)
        for mine, other in zip(seen.masters, found[0], strict=True)
    ]
    moments = [torch.equal(mine, other) for mine, other in zip(seen.moments, found[1], strict=True)]
    return all(same), all(moments), messages, dist.get_rank() if dist.is_initialized() else 0


@pytest.mark.parametrize(
    "scheme", ["fully_reshardable", pytest.param("dp_reshardable", marks=pytest.mark.full), "fsdp_dtensor"]
)
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (None, "bfloat16", "training goes on from the masters rounded"),
        ("bfloat16", None, "those of this run begin as the weights"),
        pytest.param("bfloat16", "bfloat16", None, marks=pytest.mark.full),
    ],
)
def test_checkpoints_pass_from_one_kind_to_the_other(
    before: Any, after: Any, told: str | None, scheme: str, tmp_path: Path
) -> None:
    for masters, moments, messages, rank in run(_passed_on, 2, str(tmp_path / "a"), before, after, scheme):
        assert (masters, moments) == (True, True)
        assert len(messages) == (told is not None and rank == 0)
        assert all(told in message for message in messages if told)


@pytest.mark.parametrize(
    ("stored", "dtype", "on_host", "told"),
    [
        ("bfloat16", torch.bfloat16, False, None),
        ("bfloat16", torch.bfloat16, True, None),
        ("bfloat16", torch.float32, True, "begin as the weights"),
        ("float32", torch.bfloat16, True, "the masters rounded"),
        ("float32", torch.float32, True, None),
        (None, torch.bfloat16, True, None),
    ],
)
def test_masters_in_host_memory_are_told_by_their_dtype(
    stored: str | None, dtype: torch.dtype, on_host: bool, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint has masters beside its weights if they were in host memory, also in bfloat16."""
    own = dtype == torch.bfloat16 and not on_host
    bucket = SimpleNamespace(
        shard=SimpleNamespace(master=torch.zeros(2, dtype=dtype)), master_is_own_params=own, rounds_masters=not own
    )
    tensors = {} if stored is None else {f"{MASTER}model.a": SimpleNamespace(dtype=stored)}
    model: Any = SimpleNamespace(mesh=SimpleNamespace(global_rank=0))
    there: Any = SimpleNamespace(buckets=[bucket])
    with caplog.at_level(logging.INFO, "megalight.checkpoint.run"):
        TrainingRun(model, RandomStreams(0), there, SimpleNamespace())._tell_masters(  # type: ignore[arg-type]
            SimpleNamespace(tensors=tensors, path="saved")  # type: ignore[arg-type]
        )
    assert len(caplog.messages) == (told is not None)
    assert all(told in message for message in caplog.messages if told)


def _refused(precision: str, callbacks: Any) -> str:
    module = WithData(BASE, optimizer=ADAM, seed=SEED)
    strategy = MegatronStrategy(micro_batch_size=2, data_parallel=DataParallelOptions(master_dtype="bfloat16"))
    try:
        trainer(strategy, callbacks=callbacks, precision=precision, limit_val_batches=0, max_steps=1).fit(module)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_what_needs_wider_masters_is_refused() -> None:
    assert "train bfloat16 weights" in run(_refused, 1, "32-true", [])[0]
    assert "EMA averages master weights" in run(_refused, 1, "bf16-true", [EMA()])[0]
