"""Watch a training step for what a replay would skip or freeze: logging, counters, attributes on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from megalight.strategies.user_module import own_steps

COUNTERS = ("global_step", "current_epoch")
"""Attributes of the trainer that change from step to step."""

NEXT = "keep it in a buffer of the module, which on_train_batch_start writes"

INTERNAL = frozenset(vars(pl.LightningModule())) - {"training"}
"""Attributes of modules that are Lightning's or torch's."""

STAND_INS = frozenset({"training_step", "log"})
"""Methods that :func:`watched` sets on the module for one step."""

PLAIN = (bool, int, float, str, bytes)
"""Types whose values are compared, not their identity."""


@contextmanager
def watched(module: pl.LightningModule, reasons: list[str]) -> Iterator[None]:
    """Note in ``reasons`` what a replay would not do as the step inside does it.

    Inside this context the module has a second trainer, which shares all attributes of the first one.
    """
    found: list[str] = []
    own = own_steps(module, "training_step")
    trainer = module.trainer
    module.trainer = _second(trainer, found.append, own)
    before = _host_state(module) if own else {}
    # The instance's attributes hide the class's methods, until they are removed again.
    stand_ins = _steps(module, found.append) if own else _no_logs(module, found.append)
    hidden = {name: module.__dict__[name] for name in stand_ins if name in module.__dict__}
    module.__dict__ |= stand_ins
    try:
        yield
    finally:
        module.trainer = trainer
        for name in stand_ins:
            del module.__dict__[name]
        module.__dict__ |= hidden
        if own:
            found += _changes(before, _host_state(module))
        reasons += dict.fromkeys(found)


def _no_logs(module: pl.LightningModule, note: Callable[[str], None]) -> dict[str, Any]:
    """Return the ``log`` of a module whose metrics are results of its step. What this step logs is not lost."""
    log = module.log

    def noted(name: str, *args: Any, **kwargs: Any) -> None:
        note(f"the step logs {name!r} by self.log; return it as one of loss_step's metrics")
        log(name, *args, **kwargs)

    return {"log": noted}


def _second(trainer: pl.Trainer, note: Callable[[str], None], all_reads: bool) -> pl.Trainer:
    """Return a trainer that shares all attributes with ``trainer``, and notes reads of its counters, or all reads."""
    kind = type(trainer)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if name in COUNTERS or (all_reads and not name.startswith("_")):
                note(f"the step reads {name}, and replays would repeat the value of this step; {NEXT}")
            return super().__getattribute__(name)

    Watched.__name__ = kind.__name__
    second: pl.Trainer = Watched.__new__(Watched)
    second.__dict__ = trainer.__dict__
    return second


class Index(int):
    """An integer that records its use."""

    note: Callable[[str], None]


def _telling(name: str) -> Any:
    def method(self: Index, *args: Any) -> Any:
        self.note(f"training_step computes with batch_idx, and replays would repeat the number of this step; {NEXT}")
        return getattr(int, name)(self, *args)

    return method


# Everything that reads the value in Python. What reads it in C (range) cannot be seen.
for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "index", "float", "hash", "str", "repr", "format"),
    *(f"{side}{name}" for side in ("", "r") for name in ("add", "sub", "mul", "mod", "floordiv", "truediv", "pow")),
):
    setattr(Index, f"__{_name}__", _telling(f"__{_name}__"))


def _steps(module: pl.LightningModule, note: Callable[[str], None]) -> dict[str, Any]:
    """Return the module's own step, called with numbers that record their use."""
    step = module.training_step

    def training_step(batch: Any, *others: Any) -> Any:
        given = [Index(other) if type(other) is int else other for other in others]
        for other in given:
            if isinstance(other, Index):
                other.note = note
        log = module.log

        def noted(name: str, value: Any, prog_bar: bool = False, **kwargs: Any) -> None:
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                note(f"the step logs {name!r}, of type {kind}, which replays would repeat; log a tensor on the device")
            log(name, value, prog_bar, **kwargs)

        module.__dict__["log"] = noted
        try:
            return step(batch, *given)
        finally:
            module.__dict__["log"] = log

    return {"training_step": training_step}


def _host_state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the attributes of all submodules that are not parameters, buffers or modules."""
    return {
        f"{name}.{key}".strip("."): _entry(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in INTERNAL
    }


def _entry(value: Any) -> tuple[Any, ...]:
    # A container may grow in place. The object itself is kept, so that its identity is not used again.
    return value, len(value) if isinstance(value, list | dict | set) else 0


def _changes(before: dict[str, tuple[Any, ...]], after: dict[str, tuple[Any, ...]]) -> Iterator[str]:
    for name, (value, length) in after.items():
        old, old_length = before.get(name, (value, -1))
        equal = old == value if isinstance(value, PLAIN) and isinstance(old, PLAIN) else old is value
        if not equal or length != old_length:
            yield f"the step changes the attribute {name}, which a replay does not; keep it in a buffer"
