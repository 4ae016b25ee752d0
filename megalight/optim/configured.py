"""What ``configure_optimizers`` has set, beside what a checkpoint brings: which of them a run goes on with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from megalight.errors import ConfigurationError
from megalight.optim import schedules

OTHERS = ("params", "param_names", "capturable", "foreach", "fused", "differentiable")
"""What a parameter group holds besides its hyperparameters: how it is computed, and on what."""


@dataclass(frozen=True)
class ConfiguredSchedule:
    """A scheduler before its first step.

    Attributes:
        kind: name of its class.
        every: when it steps: ``step`` or ``epoch``, and after how many of them.
        state: its ``state_dict``, as plain values.
    """

    kind: str
    every: tuple[str, int]
    state: dict[str, Any]

    @property
    def label(self) -> Any:
        """What it is called in messages: our schedules say it themselves."""
        return self.state.get(schedules.NOTE, self.kind)


@dataclass(frozen=True)
class Configured:
    """Hyperparameters before the first step.

    Attributes:
        groups: those of each parameter group of each optimizer.
        schedules: the schedulers; None: unknown, as in checkpoints that do not say it.
    """

    groups: list[list[dict[str, Any]]]
    schedules: list[ConfiguredSchedule] | None

    @classmethod
    def of(cls, optimizers: Iterable[Optimizer], configs: Iterable[Any] = ()) -> Configured:
        """Read optimizers, and Lightning's configurations of their schedulers."""
        found = [
            ConfiguredSchedule(type(c.scheduler).__name__, (c.interval, c.frequency), _plain(c.scheduler.state_dict()))
            for c in configs
        ]
        return cls([[_options(group) for group in each.param_groups] for each in optimizers], found)

    @classmethod
    def saved(cls, entry: Mapping[str, Any] | None, optimizers: Sequence[Optimizer]) -> Configured:
        """Return what a checkpoint says of its run. Without an entry: what its optimizers hold, which were just read.

        There, schedulers note the rate that they began with.
        """
        if entry is None:
            return replace(cls.of(optimizers), schedules=None)
        noted = entry["schedules"]
        found = noted and [ConfiguredSchedule(each["kind"], tuple(each["every"]), each["state"]) for each in noted]
        return cls(entry["groups"], found)

    def entry(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        return asdict(self)

    def with_functions(self, now: Configured) -> Configured:
        """Return it with the functions of ``now``, which no checkpoint holds, in the place of its own."""
        found = [
            replace(old, state={**old.state, **_note(new.state)}) if new and schedules.NOTE in old.state else old
            for old, new in _paired(self.schedules, now.schedules)
            if old is not None
        ]
        return replace(self, schedules=None if self.schedules is None else found)

    def changes(self, now: Configured) -> list[str]:
        """Return what differs in another run, as ``name old -> new``."""
        pairs = [
            (name, old.get(name), new.get(name))
            for olds, news in zip(self.groups, now.groups, strict=True)
            for old, new in zip(map(_bases, olds), map(_bases, news), strict=True)
            for name in old.keys() & new.keys()
        ]
        for old, new in _paired(self.schedules, now.schedules):
            if old is None or new is None or old.kind != new.kind:
                pairs.append(("schedule", old and old.label, new and new.label))
                continue
            pairs.append((f"steps of {new.kind}", old.every, new.every))
            # Rates are those of the groups, which are compared. Private names are counters and parts.
            names = [name for name in old.state.keys() & new.state.keys() if not name.endswith("_lrs")]
            pairs += [(name, old.state[name], new.state[name]) for name in names if not name.startswith("_")]
            if _without_rates(old.state.get("_schedulers")) != _without_rates(new.state.get("_schedulers")):
                pairs.append((f"parts of {new.kind}", "those of the checkpoint", "others"))
        lines = [f"{name} {_shown(old)} -> {_shown(new)}" for name, old, new in pairs if old != new]
        return sorted(dict.fromkeys(lines))


def go_on(
    optimizers: Sequence[Optimizer],
    configs: Sequence[Any],
    states: Sequence[Mapping[str, Any]],
    then: Configured,
    now: Configured,
    done: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Let optimizers whose state was just read go on with what is configured now; unchanged values stay as read.

    Where a rate or a schedule has changed, rates are those that the schedule of now gives after the steps so far.

    Args:
        optimizers: they hold what the checkpoint has.
        configs: Lightning's configurations of the schedulers, which are as they were made.
        states: the schedulers' states in the checkpoint.
        then: what was configured when the checkpoint was saved.
        now: what is configured now.
        done: ``step`` and ``epoch``: how many of them are done.

    Returns:
        the states of the schedulers, to load.

    Raises:
        ConfigurationError: a schedule of now ends before these steps.
    """
    result = [dict(state) for state in states[: len(configs)]]
    pairs = list(_paired(then.schedules, now.schedules))
    for number, optimizer in enumerate(optimizers):
        olds, news = then.groups[number], now.groups[number]
        mine = [index for index, config in enumerate(configs) if config.scheduler.optimizer is optimizer]
        rates = any(_bases(old)["lr"] != _bases(new)["lr"] for old, new in zip(olds, news, strict=True))
        moved = rates or len(states) != len(configs) or any(_differ(pairs, i, configs, states) for i in mine)
        read = [_options(group) for group in optimizer.param_groups]
        if moved:
            for group, new in zip(optimizer.param_groups, news, strict=True):
                _assign(group, new)
            for index in mine:
                state = _advanced(configs[index], pairs[index][0], states[index : index + 1], read, olds, news, done)
                result[index : index + 1] = [state]
        for group, before, old, new in zip(optimizer.param_groups, read, olds, news, strict=True):
            same = {name for name in new if name in before and old.get(name) == new[name]}
            if moved:  # what a scheduler moves, or its rates are, is that of now
                same = {name for name in same if not name.endswith("lr") and _value(group[name]) == new[name]}
                _assign(group, {name: before[name] for name in same})
            else:
                _assign(group, {name: new[name] for name in new if name not in same and not name.endswith("lr")})
    return result


def _differ(pairs: Sequence[Any], index: int, configs: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a scheduler is another one than that of the checkpoint."""
    (old, new), scheduler = pairs[index], configs[index].scheduler
    if old is not None and old != new:
        return True
    if not isinstance(scheduler, LambdaLR):
        return False
    # Checkpoints do not hold functions: what they give tells. The next step would take it in any case.
    step, rates = states[index]["last_epoch"], states[index]["_last_lr"]
    bases = states[index]["base_lrs"]
    given = zip(bases, scheduler.lr_lambdas, rates, strict=True)
    return not all(math.isclose(base * factor(step), rate, rel_tol=1e-6) for base, factor, rate in given)


def _advanced(
    config: Any,
    old: ConfiguredSchedule | None,
    states: Sequence[Mapping[str, Any]],
    read: Sequence[Mapping[str, Any]],
    olds: Sequence[Mapping[str, Any]],
    news: Sequence[Mapping[str, Any]],
    done: Mapping[str, int],
) -> dict[str, Any]:
    """Bring a scheduler, and the rates in its optimizer, to where the checkpoint was saved. Returns its state."""
    scheduler, every = config.scheduler, (config.interval, config.frequency)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        # It goes by a metric, so its steps cannot be repeated: what it has counted, and its factors so far, stay.
        fresh = scheduler.state_dict()
        known = dict(states[0]) if states else fresh
        changed = {name for name, value in _plain(fresh).items() if old is None or old.state.get(name) != value}
        known |= {name: fresh[name] for name in changed}
        for group, before, was, new in zip(scheduler.optimizer.param_groups, read, olds, news, strict=True):
            _assign(group, {"lr": _value(before["lr"]) * new["lr"] / was["lr"] if was["lr"] else new["lr"]})
        return known
    counted = next(iter(_counts(states[0])), None) if states and (old is None or old.every == every) else None
    steps = done[config.interval] // config.frequency if counted is None else counted
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer has stepped, in another process
            if isinstance(scheduler, LambdaLR):
                schedules.advance(scheduler, steps)
            else:
                for _ in range(steps):
                    scheduler.step()
    except ValueError as error:
        raise ConfigurationError(
            f"{type(scheduler).__name__} cannot go on after {steps} steps: {error}. Make the schedule longer, or keep "
            "that of the checkpoint (CheckpointOptions(resume_optimizer='saved'), --resume.optimizer=saved)."
        ) from error
    state: dict[str, Any] = scheduler.state_dict()
    return state


def _counts(state: Mapping[str, Any]) -> Iterable[int]:
    """Yield the steps that a scheduler has counted, or those in it."""
    if "last_epoch" in state:
        yield state["last_epoch"]
    for inner in state.get("_schedulers", ()):
        yield from _counts(inner)


def _paired(
    olds: Sequence[ConfiguredSchedule] | None, news: Sequence[ConfiguredSchedule] | None
) -> Iterable[tuple[ConfiguredSchedule | None, ConfiguredSchedule | None]]:
    """Yield schedulers of the checkpoint and of now by their places; None where there is none."""
    news = news or []
    olds = news if olds is None else olds
    for index in range(max(len(olds), len(news))):
        yield (olds[index] if index < len(olds) else None), (news[index] if index < len(news) else None)


def _note(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name == schedules.NOTE}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in group.items() if name not in OTHERS}


def _bases(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the rate that schedules begin with, in place of the one that they give."""
    return {**options, "lr": options.get("initial_lr", options["lr"]), "initial_lr": None}


def _without_rates(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _without_rates(value) for name, value in state.items() if not name.endswith(("_lr", "_lrs"))}
    return [_without_rates(each) for each in state] if isinstance(state, list) else state


def _value(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else _plain(value)


def _assign(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set options of a group; tensors keep their place, which a CUDA graph reads."""
    for name, value in values.items():
        held = group.get(name)
        if isinstance(held, Tensor):
            held.fill_(_value(value))
        else:
            group[name] = tuple(value) if isinstance(held, tuple) else value


def _plain(value: Any) -> Any:
    """Return a value as numbers, texts, lists and dicts; an object that is none of them as the name of its class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else type(value).__name__


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "kind" in value:
        return f"{value['kind']}({', '.join(f'{name}={inner}' for name, inner in value.items() if name != 'kind')})"
    return str(tuple(value) if isinstance(value, list) else value)
