"""Graphs switched on by themselves: measured by a stand-in for the clock, recorded on a tape."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megalight.callbacks import ActivationOffload, CUDAGraph, cuda_graph
from megalight.callbacks.cuda_graph import SETTLING, TIMED, StepReading
from megalight.strategies import MegatronStrategy
from megalight.strategies.micro_batches import Usage
from tests.callbacks.test_cuda_graph import Quiet
from tests.callbacks.test_cuda_graph import Reading as ReadsOnTheHost
from tests.parallel.graphs.tape import Tape
from tests.strategies.regression import Plain, batches, samples, weights
from tests.support.environment import trainer
from tests.support.workers import run

STEPS = 2 * SETTLING + 2 * TIMED + 4
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
ROOMY = Usage(0, 0, 10, 100)


class StandIn:
    """Gives the times that a test wants, by whether the step was replayed."""

    def __init__(self, callback: CUDAGraph, eager: StepReading, replayed: StepReading) -> None:
        self.callback, self.eager, self.replayed = callback, eager, replayed
        self.measured = 0

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, StepReading]:
        self.measured += 1
        before = self.callback.replays
        result = run()
        return result, self.replayed if self.callback.replays > before else self.eager


class Logs(Plain):
    """A plain LightningModule that logs tensors, and returns more than its loss."""

    def __init__(self) -> None:
        super().__init__("AdamW")
        self.shown: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("error", loss.detach().sqrt(), prog_bar=True)
        self.log_dict({"double": 2 * loss}, on_step=True)
        return {"loss": loss, "root": loss.sqrt()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        found = self.trainer.callback_metrics
        self.shown += [outputs["loss"].item(), outputs["root"].item(), found["error"].item(), found["double"].item()]


class Indexed(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        made = super().training_step(batch, batch_idx)
        return made if batch_idx % 2 else {**made, "loss": 2 * made["loss"]}


class Scaled(Logs):
    """A number on the host reaches an operation unseen."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        made = super().training_step(batch, batch_idx)
        return {**made, "loss": made["loss"] * batch_idx}


class Counts(Logs):
    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.seen += 1
        return super().training_step(batch, batch_idx)


class Keeps(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        made = super().training_step(batch, batch_idx)
        self.losses.append(made["loss"].detach())
        return made


class LogsANumber(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.log("rate", 0.1)
        return super().training_step(batch, batch_idx)


class AsksTheTrainer(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        made = super().training_step(batch, batch_idx)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        return {**made, "loss": made["loss"] * rate}


def trained(kind: Any, callback: CUDAGraph | None, window: int = 1) -> tuple[list[Any], list[float]]:
    """Weights after training, and what the module has seen."""
    torch.manual_seed(3)
    module = kind()
    if callback is not None:
        callback.recorder = Tape()
    data = batches(4 * STEPS * window, 4) if isinstance(module, Plain) else None
    options = {"max_steps": STEPS, "max_epochs": 99, "limit_val_batches": 0, "use_distributed_sampler": False}
    callbacks = [] if callback is None else [callback]
    runner = trainer(
        MegatronStrategy(micro_batch_size=2), callbacks=callbacks, accumulate_grad_batches=window, **options
    )
    runner.fit(module, data)
    return weights(module), getattr(module, "shown", [])


def tried(kind: Any, eager: StepReading, replayed: StepReading, window: int = 1) -> Any:
    """Train with automatic graphs; return replays, reasons, verdict, measured steps, and what was trained."""
    callback = CUDAGraph("auto")
    callback.probe = probe = StandIn(callback, eager, replayed)
    found = trained(kind, callback, window)
    verdict = None if callback.trial is None else callback.trial.verdict
    return callback.replays, "; ".join(callback.reasons), verdict, probe.measured, found


def asked(kind: Any) -> Any:
    callback = CUDAGraph(warmup_steps=3)
    found = trained(kind, callback)
    return callback.replays, "; ".join(callback.reasons), found


def equal(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


SLOW = StepReading(0.010, 0.011, ROOMY)
FAST = StepReading(0.001, 0.004, ROOMY)


@pytest.mark.parametrize(("kind", "window"), [(Quiet, 1), (Logs, 1), (Logs, 2)])
def test_steps_bound_by_launches_are_replayed(kind: Any, window: int) -> None:
    replays, reasons, verdict, measured, found = run(tried, 1, kind, SLOW, FAST, window)[0]
    assert (reasons, verdict) == ("", "4.0 ms for forward and backward, 11.0 ms without")
    # Eager steps and those of the trial; the last ones are replayed without being measured.
    assert measured < window * STEPS
    assert replays > TIMED
    equal(found, run(trained, 1, kind, None, window)[0])


@pytest.mark.parametrize(
    ("eager", "replayed", "verdict"),
    [
        (StepReading(0.002, 0.010, ROOMY), FAST, "the device is busy, launches take 2.0 of 10.0 ms"),
        (SLOW, StepReading(0.001, 0.0109, ROOMY), "10.9 ms for forward and backward, 11.0 ms without"),
        (StepReading(0.010, 0.011, Usage(0, 40, 80, 100)), FAST, "a graph would keep 0.0 GiB, and 0.0 GiB are free"),
    ],
)
def test_otherwise_they_run_as_before(eager: StepReading, replayed: StepReading, verdict: str) -> None:
    replays, reasons, found_verdict, _, found = run(tried, 1, Logs, eager, replayed)[0]
    assert (reasons, found_verdict) == ("", verdict)
    assert replays == (SETTLING + TIMED if "without" in verdict else 0)
    equal(found, run(trained, 1, Logs, None)[0])


def hidden(eager: StepReading, replayed: StepReading, gains: bool) -> Any:
    """Train with split layers that hide more in recorded steps; also return what layers were told, and when."""
    told: list[tuple[bool, int]] = []
    callback = CUDAGraph("auto")
    callback.probe = probe = StandIn(callback, eager, replayed)
    with (
        mock.patch.object(cuda_graph, "gains_by_recording", return_value=gains),
        mock.patch.object(cuda_graph, "steps_recorded", lambda chunk, flag: told.append((flag, probe.measured))),
    ):
        trained(Logs, callback)
    return callback.replays, callback.trial and callback.trial.verdict, told


BUSY = StepReading(0.002, 0.010, ROOMY)


def test_a_busy_device_is_no_reason_where_recorded_layers_hide_more() -> None:
    replays, verdict, told = run(hidden, 1, BUSY, FAST, True)[0]
    assert (replays > TIMED, verdict) == (True, "4.0 ms for forward and backward, 10.0 ms without")
    assert told[0] == (True, TIMED), "eager steps are measured as they would be without graphs"
    assert [flag for flag, _ in told] == [True, False]


def test_layers_hear_of_graphs_that_are_given_up() -> None:
    _, verdict, told = run(hidden, 1, BUSY, StepReading(0.001, 0.0099, ROOMY), True)[0]
    assert verdict == "9.9 ms for forward and backward, 10.0 ms without"
    assert [flag for flag, _ in told] == [True, False]
    assert run(hidden, 1, BUSY, FAST, False)[0][2] == [], "they were never tried"


def test_ranks_decide_alike() -> None:
    for replays, reasons, verdict, _, _ in run(tried, 2, Logs, SLOW, FAST):
        assert (replays > TIMED, reasons, verdict) == (True, "", "4.0 ms for forward and backward, 11.0 ms without")


def test_steps_that_cannot_be_recorded_end_the_trial() -> None:
    replays, reasons, verdict, _, _ = run(tried, 1, ReadsOnTheHost, SLOW, FAST)[0]
    assert (replays, verdict) == (0, "they cannot be recorded")
    assert re.search("reads a value of a tensor", reasons)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Indexed, "training_step computes with batch_idx"),
        (Scaled, r"computes with a Python number that changes from step to step.* at test_automatic_graph.py"),
        (Counts, "changes the attribute seen"),
        (Keeps, "changes the attribute losses"),
        (LogsANumber, "logs 'rate', of type float"),
        (AsksTheTrainer, "the step reads optimizers"),
    ],
)
def test_a_plain_step_that_a_replay_would_not_repeat_runs_eagerly(kind: Any, match: str) -> None:
    replays, reasons, found = run(asked, 1, kind)[0]
    assert replays == 0
    assert re.search(match, reasons), reasons
    equal(found, run(trained, 1, kind, None)[0])


class Manual(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        made = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(made["loss"])
        self.optimizers().step()
        return {name: value.detach() for name, value in made.items()}


def without_shards() -> Any:
    callback = CUDAGraph("auto")
    callback.recorder = Tape()
    runner = trainer(MegatronStrategy(), callbacks=[callback], max_steps=2, limit_val_batches=0)
    runner.fit(Manual(), batches(8, 4))
    return runner.global_step, callback.replays, callback.reasons, callback.trial


def test_nothing_happens_without_shards() -> None:
    assert run(without_shards, 1)[0] == (2, 0, [], None)


class Brings(Logs):
    """Its module brings a callback that graphs cannot serve, or that records itself."""

    def __init__(self, brought: pl.Callback) -> None:
        super().__init__()
        self.brought = brought

    def configure_callbacks(self) -> list[pl.Callback]:
        return [self.brought]


def beside(other: str, owner: str) -> Any:
    """Train beside another callback; return replays of both, and whether the other one did its work."""
    callback = CUDAGraph("auto")
    callback.recorder = own = Tape()
    brought: Any = CUDAGraph(warmup_steps=2) if other == "CUDAGraph" else ActivationOffload(["0"], min_elements=1)
    if isinstance(brought, CUDAGraph):
        brought.recorder = Tape()
    callbacks = [callback, brought] if owner == "trainer" else [callback]
    module = Brings(brought) if owner == "module" else Logs()
    strategy = MegatronStrategy(micro_batch_size=2)
    options = {"max_steps": 6, "limit_val_batches": 0, "use_distributed_sampler": False}
    # A module without layers stands for its own layer.
    with (
        mock.patch("megalight.callbacks.memory.chosen", lambda chunk, *others, **more: [chunk]),
        mock.patch("megalight.callbacks.memory.check_patterns"),
    ):
        trainer(strategy, callbacks=callbacks, **options).fit(module, batches(24, 4))
    return own.entered, callback.replays, callback.trial, brought.replays if other == "CUDAGraph" else brought.moved > 0


@pytest.mark.parametrize("owner", ["trainer", "module"])
@pytest.mark.parametrize(("other", "works"), [("CUDAGraph", 4), ("ActivationOffload", True)])
def test_other_callbacks_go_first(other: str, works: Any, owner: str) -> None:
    assert run(beside, 1, other, owner)[0] == (0, 0, None, works)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_nothing_happens_without_a_gpu() -> None:
    callback = CUDAGraph("auto")
    runner = pl.Trainer(accelerator="cpu", callbacks=[callback], max_steps=2, limit_val_batches=0, **QUIET)
    runner.fit(Plain(), DataLoader(TensorDataset(*map(Tensor.float, samples(8))), batch_size=4))
    assert (callback.replays, callback.reasons, callback.trial) == (0, [], None)
