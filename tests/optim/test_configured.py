"""Hyperparameters of a run that resumes: those configured now win where they have changed, and only there."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

from megalight.checkpoint.json_values import decode, encode
from megalight.errors import ConfigurationError
from megalight.optim import CosineDecay, LinearDecay
from megalight.optim.configured import Configured, go_on
from megalight.optim.schedules import noted

DONE = 5
NOTHING: dict[str, Any] = {}


def sequential(optimizer: Any, milestone: int = 2, gamma: float = 0.9) -> Any:
    parts = [torchs.ConstantLR(optimizer, 0.5, 2), torchs.ExponentialLR(optimizer, gamma)]
    return torchs.SequentialLR(optimizer, parts, [milestone])


def chained(optimizer: Any, gamma: float = 0.9) -> Any:
    return torchs.ChainedScheduler([torchs.ConstantLR(optimizer, 0.5, 9), torchs.ExponentialLR(optimizer, gamma)])


SCHEDULES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "none": (None, {}, {}),
    "cosine": (lambda o, **k: CosineDecay(**k).build(o), {"warmup": 2, "steps": 9}, {"warmup": 2, "steps": 40}),
    "function": (torchs.LambdaLR, {"lr_lambda": lambda s: 1 / (1 + s)}, {"lr_lambda": lambda s: 1 / (2 + s)}),
    "step": (torchs.StepLR, {"step_size": 2}, {"step_size": 2, "gamma": 0.3}),
    "milestones": (torchs.MultiStepLR, {"milestones": [1, 3]}, {"milestones": [2, 9]}),
    "exponential": (torchs.ExponentialLR, {"gamma": 0.9}, {"gamma": 0.8}),
    "annealing": (torchs.CosineAnnealingLR, {"T_max": 8}, {"T_max": 20, "eta_min": 0.001}),
    "restarts": (torchs.CosineAnnealingWarmRestarts, {"T_0": 3}, {"T_0": 2, "T_mult": 2}),
    "one cycle": (torchs.OneCycleLR, {"max_lr": 0.5, "total_steps": 20}, {"max_lr": 0.4, "total_steps": 30}),
    "cyclic": (
        torchs.CyclicLR,
        {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3, "cycle_momentum": False},
        {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 2, "cycle_momentum": False},
    ),
    "sequential": (sequential, {}, {"milestone": 4}),
    "chained": (chained, {}, {"gamma": 0.7}),
}


def made(name: str, changed: bool, lr: float = 0.1, **options: Any) -> tuple[Any, list[Any]]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=lr, **options)
    make, *arguments = SCHEDULES[name]
    if make is None:
        return optimizer, []
    scheduler = make(optimizer, **arguments[changed])
    return optimizer, [SimpleNamespace(scheduler=scheduler, interval="step", frequency=1)]


def stepped(optimizer: Any, configs: list[Any], steps: int = DONE) -> list[dict[str, Any]]:
    found = []
    for _ in range(steps):
        found.append({name: value for name, value in optimizer.param_groups[0].items() if name != "params"})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for config in configs:
                config.scheduler.step()
    return found


def resumed(
    before: tuple[Any, list[Any]], after: tuple[Any, list[Any]], known: bool = True, train: Any = stepped, **moved: Any
) -> list[str]:
    """Step ``before``, save it, and let ``after`` go on from there. Returns what has changed."""
    entry = Configured.of([before[0]], before[1]).entry()
    before[0].param_groups[0].update(moved)  # by a callback, in training
    train(*before)
    tensors: list[Any] = []
    states = decode(encode([config.scheduler.state_dict() for config in before[1]], tensors), tensors, "it")
    optimizer, configs = after
    now = Configured.of([optimizer], configs)
    optimizer.load_state_dict(before[0].state_dict())
    then = Configured.saved(decode(encode(entry, tensors), tensors, "it") if known else None, [optimizer])
    loaded = go_on([optimizer], configs, states, then, now, {"step": DONE, "epoch": 0})
    for config, state in zip(configs, loaded, strict=True):
        config.scheduler.load_state_dict(state)
    return then.changes(now)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_has_not_changed_goes_on_as_it_was(name: str) -> None:
    whole = stepped(*made(name, False), 2 * DONE)
    for known in (True, False):
        if name == "one cycle" and not known:
            continue  # it moves betas, and older checkpoints do not say where they began
        before, after = made(name, False), made(name, False)
        assert resumed(before, after, known, weight_decay=0.7) == ([] if known else ["weight_decay 0.7 -> 0.01"])
        found = stepped(*after)
        decay = {"weight_decay": 0.7 if known else 0.01}
        assert found == [{**options, **decay} for options in whole[DONE:]]


@pytest.mark.parametrize("lr", [0.1, 0.03])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_has_changed_is_as_if_it_had_always_been_so(name: str, lr: float) -> None:
    options = {"betas": (0.5, 0.6), "eps": 1e-4, "weight_decay": 0.3}
    whole = stepped(*made(name, True, lr, **options), 2 * DONE)
    after = made(name, True, lr, **options)
    changes = resumed(made(name, False), after)
    for found, expected in zip(stepped(*after), whole[DONE:], strict=True):
        for key, value in expected.items():
            assert found[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert "eps 1e-08 -> 0.0001" in changes
    assert ("lr 0.1 -> 0.03" in changes) == (lr != 0.1) or name in ("one cycle", "cyclic")


def test_a_checkpoint_that_does_not_say_what_was_configured() -> None:
    after = made("cosine", True, 0.03)
    assert resumed(made("cosine", False), after, known=False) == ["lr 0.1 -> 0.03"]
    assert stepped(*after) == stepped(*made("cosine", True, 0.03), 2 * DONE)[DONE:]


@pytest.mark.parametrize(("old", "new"), [("none", "cosine"), ("step", "none"), ("exponential", "restarts")])
def test_another_kind_of_schedule(old: str, new: str) -> None:
    after = made(new, False)
    (change,) = (each for each in resumed(made(old, False), after) if each.startswith("schedule"))
    assert " -> " in change
    rates = [options["lr"] for options in stepped(*made(new, False), 2 * DONE)]
    assert [options["lr"] for options in stepped(*after)] == pytest.approx(rates[DONE:])


def test_a_schedule_by_a_metric_keeps_its_counts() -> None:
    def plateau(lr: float, **options: Any) -> tuple[Any, list[Any]]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
        scheduler = torchs.ReduceLROnPlateau(optimizer, **options)
        return optimizer, [SimpleNamespace(scheduler=scheduler, interval="epoch", frequency=1)]

    def reduced(optimizer: Any, configs: list[Any]) -> None:
        for _ in range(4):
            configs[0].scheduler.step(1.0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)

    before, after = plateau(0.1, patience=1), plateau(0.2, patience=3, factor=0.5)
    changes = ["factor 0.1 -> 0.5", "lr 0.1 -> 0.2", "patience 1 -> 3"]
    assert resumed(before, after, train=reduced) == changes
    (group,), scheduler = after[0].param_groups, after[1][0].scheduler
    assert group["lr"] == pytest.approx(0.02)  # reduced once so far
    assert (scheduler.patience, scheduler.factor, scheduler.best) == (3, 0.5, 1.0)
    assert scheduler.num_bad_epochs == before[1][0].scheduler.num_bad_epochs


def test_a_rate_in_a_tensor_keeps_its_place() -> None:
    before, after = (made("none", False, torch.tensor(lr)) for lr in (0.1, 0.03))  # type: ignore[arg-type]
    entry = Configured.of([before[0]]).entry()
    held, now = after[0].param_groups[0]["lr"], Configured.of([after[0]])
    held.fill_(0.1)  # as it was read
    go_on([after[0]], [], [], Configured.saved(entry, [after[0]]), now, {"step": 1, "epoch": 0})
    assert after[0].param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(0.03)


def test_a_schedule_that_is_too_short_is_refused() -> None:
    SCHEDULES["short"] = (torchs.OneCycleLR, {"max_lr": 0.5, "total_steps": 20}, {"max_lr": 0.5, "total_steps": 3})
    try:
        with pytest.raises(ConfigurationError, match="OneCycleLR cannot go on after 5 steps"):
            resumed(made("short", False), made("short", True))
    finally:
        del SCHEDULES["short"]


def test_a_schedule_comes_back_from_its_note() -> None:
    for schedule in (CosineDecay(warmup=2, steps=9), LinearDecay(steps=4)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        assert noted(schedule.build(optimizer).state_dict()["schedule"]) == schedule
    assert noted({"kind": "Mine"}) is noted(None) is None
