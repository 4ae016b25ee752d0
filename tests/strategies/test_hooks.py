"""The order of Lightning's hooks under MegatronStrategy, Lightning's private names, and stopping together."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
import os
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from megalight import checkpoint
from megalight.strategies import DataParallelOptions, MegatronStrategy, _lightning
from megalight.strategies.user_module import defines, reads_weights_between_steps
from tests.strategies.regression import Plain, batches, samples, strategy, weights
from tests.strategies.training import ADAM, CONFIGS, SEED, WithData
from tests.support.environment import PoolEnvironment, trainer
from tests.support.workers import run

LOOP = [
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "training_step",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
]
"""Two micro-batches: Lightning's order, and the second one before the update."""
ORDER = [
    "setup_environment",
    "setup",
    "configure_model",
    "strategy.setup",
    "configure_optimizers",
    "on_fit_start",
    "on_sanity_check_start",
    "on_validation_start",
    "on_validation_end",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    *LOOP,
    *LOOP,
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "strategy.teardown",
    "on_fit_end",
    "teardown",
]


class Traced(Plain):
    calls: list[str]

    def configure_model(self) -> None:
        self.calls.append("configure_model")

    def configure_optimizers(self) -> Any:
        self.calls.append("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, *args: Any) -> Any:
        self.calls.append("training_step")
        return super().training_step(*args)


class TracedStrategy(MegatronStrategy):
    calls: list[str]

    def setup_environment(self) -> None:
        self.calls.append("setup_environment")
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        self.calls.append("strategy.setup")
        super().setup(trainer)

    def teardown(self) -> None:
        self.calls.append("strategy.teardown")
        super().teardown()


def tracer(calls: list[str]) -> pl.Callback:
    def record(name: str) -> Any:
        return lambda self, *args, **kwargs: calls.append(name)

    names = {name for name in ORDER if hasattr(pl.Callback, name)}
    cls = type("Tracer", (pl.Callback,), {name: record(name) for name in names})
    return cls()  # type: ignore[no-any-return]


def _trace() -> list[str]:
    calls: list[str] = []
    how, module = TracedStrategy(micro_batch_size=2), Traced("SGD")
    how.calls = module.calls = calls
    runner = trainer(how, callbacks=[tracer(calls)], max_steps=-1, max_epochs=1, num_sanity_val_steps=1)
    runner.fit(module, batches(8, 4), batches(4, 4))
    return calls


def test_hooks_run_in_this_order() -> None:
    assert run(_trace, 1)[0] == ORDER


# ---------------------------------------------------------------------- reading weights, waiting for the device


def read(trainer: pl.Trainer, module: Any, *args: Any) -> None:
    """Fails where replicas do not hold the same weights."""
    flat = torch.cat([p.detach().reshape(-1) for p in module.model.parameters()])
    parts = [torch.empty_like(flat) for _ in range(trainer.world_size)]
    torch.distributed.all_gather(parts, flat)
    assert torch.equal(parts[0], parts[1])


class Reader(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        read(trainer, pl_module)


class Stepping(WithData):
    """Reads its weights after the update."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        read(self.trainer, self)


class Inherits(LearningRateMonitor):
    """Defines nothing of its own."""


@pytest.mark.parametrize(
    ("callback", "module", "waits"),
    [
        (Reader, WithData, True),
        (partial(LambdaCallback, on_train_batch_end=read), WithData, True),
        (Inherits, Stepping, True),
        (Inherits, WithData, False),
    ],
)
def test_parameters_are_whole_for_code_that_may_read_them(
    callback: Callable[[], pl.Callback], module: type[WithData], waits: bool
) -> None:
    assert run(_fit_and_tell, 2, callback, module) == [waits] * 2


def _fit_and_tell(callback: Callable[[], pl.Callback], module: type[WithData]) -> bool:
    how: Any = MegatronStrategy(data_parallel=DataParallelOptions(bucket_size=500))
    runner = trainer(
        how, callbacks=[callback()], use_distributed_sampler=False, limit_val_batches=0, logger=DummyLogger()
    )
    runner.fit(module(CONFIGS["gqa"], optimizer=ADAM, seed=SEED))
    return bool(how._whole_between_steps)


class Reads(TorchDispatchMode):
    """Where values are read off the device: each ``item()``, ``float()`` or ``bool()`` of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
            self.places.append(next(f for f in reversed(frames) if "/torch/" not in f and __file__ not in f))
        return func(*args, **(kwargs or {}))


class Watched(WithData):
    """Watches everything from the start of its batches to their end."""

    reads: Reads

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.reads.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.reads.__exit__(None, None, None)


def _waits(precision: str) -> list[str]:
    module = Watched(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    module.reads = Reads()
    runner = trainer(
        MegatronStrategy(micro_batch_size=1), use_distributed_sampler=False, limit_val_batches=0,
        gradient_clip_val=1.0, precision=precision, logger=DummyLogger(), log_every_n_steps=100,
    )  # fmt: skip
    runner.fit(module)
    return [place for place in module.reads.places if "optim/adam.py" not in place]  # its step counter is on the host


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_no_step_waits_for_the_device(precision: str) -> None:
    assert run(_waits, 2, precision) == [[], []]


# ---------------------------------------------------------------------- Lightning's private names


def _resolve(name: str, runner: pl.Trainer) -> Any:
    roots: dict[str, Any] = {
        "trainer": runner,
        "strategy": runner.strategy,
        "module": pl.LightningModule(),
        "learning_rate_finder": LearningRateFinder(),
        "model_checkpoint": ModelCheckpoint(),
        "batch_size_finder": BatchSizeFinder(),
        "call": importlib.import_module("lightning.pytorch.trainer.call"),
        "strategies": importlib.import_module("lightning.pytorch.strategies"),
        "lightning": importlib.import_module("lightning"),
    }
    first, *rest = name.split(".")
    value = roots[first]
    for attribute in rest:
        value = getattr(value, attribute)
    return value


def _names() -> dict[str, str]:
    runner = trainer(strategy())
    return {name: type(_resolve(name, runner)).__name__ for name in _lightning.USED}


def test_every_private_name_resolves() -> None:
    assert set(run(_names, 1)[0]) == set(_lightning.USED)


def test_private_names_used_are_listed() -> None:
    """No underscored attribute or import of Lightning's outside the list."""
    listed = {part for name in _lightning.USED for part in name.split(".") if part.startswith("_")}
    tree = ast.parse(inspect.getsource(_lightning))
    used = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            used.add(node.attr)
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private <= listed


def test_private_names_mean_what_they_did() -> None:
    epoch_loop = pl.loops._TrainingEpochLoop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(epoch_loop.advance)
    assert "received_sigterm" in inspect.getsource(epoch_loop.on_advance_end)
    assert list(inspect.signature(epoch_loop._broadcast_sigterm_tensor).parameters) == ["self"]
    connector = importlib.import_module("lightning.pytorch.trainer.connectors.signal_connector")._SignalConnector
    assert "self._sigterm_notifier_fn" in inspect.getsource(connector.register_signal_handlers)
    assert "self._slurm_sigusr_handler_fn" in inspect.getsource(connector.register_signal_handlers)
    for handler in (connector._sigterm_notifier_fn, connector._slurm_sigusr_handler_fn):
        assert list(inspect.signature(handler).parameters)[1:] == ["signum", "_"]
    assert "strategy._layer_sync" in inspect.getsource(_AcceleratorConnector)
    assert "strategy._configure_launcher()" in inspect.getsource(_AcceleratorConnector)
    assert "_zero_grad_fn is not None" in inspect.getsource(Closure.closure)
    call = importlib.import_module("lightning.pytorch.trainer.call")
    assert list(inspect.signature(call._call_callback_hooks).parameters)[:2] == ["trainer", "hook_name"]
    assert list(inspect.signature(call._call_lightning_module_hook).parameters)[:2] == ["trainer", "hook_name"]


def _skips() -> tuple[bool, bool]:
    runner = trainer(strategy())
    optimization = runner.fit_loop.epoch_loop.automatic_optimization
    runner.fit_loop._skip_backward = True
    skipped = optimization._make_backward_fn(None) is None and optimization._make_zero_grad_fn(0, None) is None  # type: ignore[arg-type]
    runner.fit_loop._skip_backward = False
    return skipped, optimization._make_backward_fn(None) is None  # type: ignore[arg-type]


def test_skip_backward_leaves_training_step_alone() -> None:
    assert run(_skips, 1)[0] == (True, False)


# ---------------------------------------------------------------------- stopping together


class Told(pl.Callback):
    """One rank gets SIGTERM in one of its batches."""

    def __init__(self, rank: int, step: int = 3) -> None:
        self.rank = rank
        self.step = step
        self.steps = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.steps += 1
        if self.steps == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def _stopped(rank: int, step: int = 3, every: int = 2) -> tuple[str, int]:
    before = signal.getsignal(signal.SIGTERM)
    told = Told(rank, step)
    module = Plain("SGD")
    runner = trainer(strategy(sigterm_every_n_steps=every), callbacks=[told], max_steps=20, limit_val_batches=0)
    runner.strategy.launcher.kill = lambda number: None  # type: ignore[method-assign,union-attr]
    try:
        runner.fit(module, batches(80, 2))
        outcome = "finished"
    except SIGTERMException:
        outcome = "stopped"
    assert signal.getsignal(signal.SIGTERM) == before
    assert "_sigterm_notifier_fn" not in vars(runner._signal_connector)
    return outcome, runner.global_step


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_stop_at_the_same_step(rank: int) -> None:
    assert run(_stopped, 2, rank) == [("stopped", 3)] * 2
    # At each of the first ten batches the ranks ask each other, and later at every eighth.
    assert run(_stopped, 2, rank, 9, 8) == [("stopped", 9)] * 2
    assert run(_stopped, 2, rank, 11, 8) == [("stopped", 15)] * 2


def test_one_rank_stops_at_once() -> None:
    assert run(_stopped, 1, 0) == [("stopped", 3)]


def _words_at_the_end() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megalight.strategies._lightning")
    logger.addHandler(handler)
    try:
        _stopped(1)
    finally:
        logger.removeHandler(handler)
    return [text for text in said if "ended the run" in text]


def test_a_run_that_sigterm_ended_says_so_once() -> None:
    first, second = run(_words_at_the_end, 2)
    assert len(first) == 1
    assert first[0].startswith("a signal ended the run after step 3.")
    assert "ckpt_path='last'" in first[0]
    assert second == []


class Slurm(PoolEnvironment, SLURMEnvironment):
    """The worker pool as a job of SLURM, which signals SIGUSR1 some time before the job ends."""


class Announced(pl.Callback):
    """One rank gets SIGUSR1 in the middle of its fourth batch, the second one of an accumulation window."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.batches = 0

    def on_after_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        self.batches += 1
        if self.batches == 4 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGUSR1)


class Whole(Plain):
    """Its optimizer needs whole parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.02)


def _requeued(kind: type[Plain], rank: int, root: str) -> tuple[list[Any], list[str], int, list[int], bool]:
    """Train with a signal, then as the job's next start.

    Returns:
        commands, folders, the saved step, the batches of both runs, whether their weights are equal.
    """
    commands: list[Any] = []
    connector: Any = importlib.import_module("lightning.pytorch.trainer.connectors.signal_connector")
    options = {"accumulate_grad_batches": 2, "max_steps": 8, "limit_val_batches": 0, "default_root_dir": root}
    # Equal batches: this loader begins anew when training resumes.
    row = tuple(part[0] for part in samples(1))
    same = DataLoader([row] * 80, batch_size=2)  # type: ignore[arg-type]
    ends, counts = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connector, "call", lambda command: commands.append(command) or 0)
        for name, value in {"JOB_ID": "4711", "JOB_NAME": "train", "NTASKS": "1"}.items():
            patch.setenv(f"SLURM_{name}", value)  # Lightning looks for its checkpoint only on SLURM
        for told in (Announced(rank), Announced(-1)):
            how = strategy("no_shard", sigterm_every_n_steps=2)
            runner = trainer(how, plugins=[Slurm()], callbacks=[told], **options)
            module = kind()
            runner.fit(module, same)
            ends.append(weights(module))
            counts.append(told.batches)
            assert "_slurm_sigusr_handler_fn" not in vars(runner._signal_connector)
    folders = sorted(os.listdir(root))
    saved = checkpoint.open(f"{root}/{folders[0]}").common["global_step"]
    return commands, folders, saved, counts, ends[0] == ends[1]


@pytest.mark.parametrize(("kind", "ranks", "rank"), [(Plain, 1, 0), (Plain, 2, 1), (Whole, 1, 0)])
def test_jobs_of_slurm_are_saved_and_requeued(kind: type[Plain], ranks: int, rank: int, tmp_path: Path) -> None:
    """Alone before the next step; else where all ranks ask each other, though one alone was told."""
    requeue, step = ["scontrol", "requeue", "4711"], 2 if ranks == 1 else 3
    for number, told in enumerate(run(_requeued, ranks, kind, rank, str(tmp_path))):
        assert told == ([] if number else [requeue], ["hpc_ckpt_1.ckpt"], step, [16, 16 - 2 * step], True)


class Between(pl.Callback):
    """A user's callback with a hook between two steps."""

    def on_train_batch_end(self, *args: Any) -> None: ...


class Harmless(Between):
    """The same, which reads no weights."""

    reads_weights = False


def test_hooks_are_found_on_the_class_and_on_the_object() -> None:
    module, callback = WithData(CONFIGS["gqa"]), Between()
    assert [name for name in ("on_train_batch_end", "on_train_start") if defines(callback, name)] == [
        "on_train_batch_end"
    ]
    callback.on_train_start = functools.partial(print, "begins")
    assert defines(callback, "on_train_start")
    assert defines(LambdaCallback(on_before_backward=lambda *_: None), "on_before_backward")
    assert not defines(LambdaCallback(on_fit_start=lambda *_: None), "on_before_backward")
    assert not defines(module, "optimizer_step")
    module.optimizer_step = lambda *_: None
    assert defines(module, "optimizer_step")
    assert not defines(LearningRateMonitor(), "on_train_batch_start"), "Lightning's own callbacks are known"


def test_gathering_goes_on_under_callbacks_that_read_no_weights() -> None:
    def waits(*callbacks: pl.Callback) -> bool:
        runner = pl.Trainer(callbacks=[LearningRateMonitor(), *callbacks], accelerator="cpu", logger=DummyLogger())
        return reads_weights_between_steps(WithData(CONFIGS["gqa"]), runner)

    assert [waits(), waits(Harmless()), waits(Harmless(), Between())] == [False, False, True]
