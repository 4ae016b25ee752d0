"""What constructors refuse is found in their source, in their own words, and nothing else is."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.callbacks import (
    EMA,
    Adapters,
    CUDAGraph,
    Distillation,
    Preemption,
    ProfilerWindow,
    Retention,
    Stragglers,
    Timers,
    TransformersExport,
)
from megalight.cli import signatures
from megalight.cli.checks import constructors, expressions, walk
from megalight.cli.sources import ClassSource, find_class, find_module
from megalight.errors import ConfigurationError, MegalightError
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.presets import PRESETS
from megalight.optim import WSD, AdamConfig, Cosine
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import MegatronStrategy

REFUSED: list[tuple[Any, dict[str, Any]]] = [
    (EMA, {"decay": 2.0}),
    (Adapters, {}),
    (Adapters, {"rank": 0}),
    (Adapters, {"rank": 4, "dropout": 1.5}),
    (Adapters, {"rank": 4, "block": 64}),
    (CUDAGraph, {"warmup_steps": 1}),
    (CUDAGraph, {"max_graphs": 2, "scope": "layer"}),
    (Distillation, {}),
    (Distillation, {"teacher": "a", "scale": -1.0}),
    (Distillation, {"teacher": "a", "balance": True}),
    (ProfilerWindow, {"start_step": 5, "stop_step": 2}),
    (Preemption, {"after_minutes": -1.0}),
    (Retention, {"last": 0}),
    (Stragglers, {"warn_ratio": 0.5}),
    (Timers, {"level": 5}),
    (Timers, {"every_n_steps": 0}),
    (TransformersExport, {"folder": "x", "when": "checkpoint"}),
    (AdamConfig, {"lr": -1.0}),
    (AdamConfig, {"betas": (0.9, 1.5)}),
    (Cosine, {"warmup": 10, "steps": 5}),
    (Cosine, {"min_ratio": 2.0}),
    (WSD, {"decay": 0.0}),
    (WSD, {"warmup": -1}),
    (DataParallelOptions, {"bucket_size": 0}),
    (DataParallelOptions, {"replicate": 2, "level": "no_shard"}),
    (RecomputeOptions, {"granularity": "full", "num_layers": 0}),
    (RecomputeOptions, {"num_layers": 2}),
    (MegatronStrategy, {"tensor_parallel": 0}),
    (MegatronStrategy, {"timeout_seconds": -5.0}),
    (MegatronStrategy, {"sequence_parallel": True}),
    (ModelCheckpoint, {"save_top_k": -2}),
    (ModelCheckpoint, {"save_top_k": 3}),
]


def source_of(kind: type) -> ClassSource:
    found = find_class(f"{kind.__module__}.{kind.__qualname__}")
    assert found is not None
    return found


def name_of(value: Any) -> str:
    """The same in every process: what is not known has no name but its address."""
    return getattr(value, "__name__", str(value).replace(str(expressions.UNKNOWN), "unknown"))


@pytest.mark.parametrize(("kind", "given"), REFUSED, ids=name_of)
def test_the_source_says_what_the_constructor_says(kind: Any, given: dict[str, Any]) -> None:
    with pytest.raises((MegalightError, MisconfigurationException)) as there:
        kind(**given)
    with pytest.raises(MegalightError) as here:
        walk.Walk(source_of(kind).module).construct(source_of(kind), given)
    assert str(here.value) == str(there.value)


@dataclass(frozen=True)
class Above:
    kind: ClassVar[str] = "above"
    size: int = 1
    made: int = field(init=False, default=3)


@dataclass(frozen=True)
class Below(Above):
    count: int = 1

    def __post_init__(self) -> None:
        if self.count > 2 or self.size > 2:
            raise ConfigurationError(f"size={self.size}, count={self.count}")


class Holder:
    def __init__(self, size: int, count: int) -> None:
        self.below = Below(size, count)


def test_arguments_without_a_name_go_where_the_constructor_puts_them() -> None:
    source = find_class(f"{__name__}.Below")
    assert source is not None
    assert [*(signatures.members(source) or ())] == ["size", "count"]
    holder = find_class(f"{__name__}.Holder")
    assert holder is not None
    # The order of fields of several classes is left to Python.
    walk.Walk(holder.module).construct(holder, {"size": 1, "count": 5})


ACCEPTED: list[tuple[Any, dict[str, Any]]] = [
    (EMA, {"decay": 0.5}),
    (Adapters, {"rank": 4, "targets": ("attention.*",)}),
    (CUDAGraph, {"max_graphs": 2}),
    (Timers, {"level": 2}),
    (AdamConfig, {"betas": (0.9, 0.99)}),
    (AdamConfig, {"lr": expressions.UNKNOWN}),
    (WSD, {"warmup": 3, "decay": 1.0}),
    (DataParallelOptions, {"bucket_size": 5, "level": expressions.UNKNOWN}),
    (RecomputeOptions, {"granularity": "full"}),
    (MegatronStrategy, {"tensor_parallel": 2, "sequence_parallel": True}),
    (ModelCheckpoint, {"save_top_k": -1}),
]


@pytest.mark.parametrize(("kind", "given"), ACCEPTED, ids=name_of)
def test_what_is_right_or_unknown_is_let_through(kind: Any, given: dict[str, Any]) -> None:
    walk.Walk(source_of(kind).module).construct(source_of(kind), given)


PIECES = {
    # Each refuses 3 if what it computes were taken for known, and does not when it is made.
    "a name that is changed": "size = helper(size)\nif size == 3: raise ConfigurationError('no')",
    "a loop": "for _ in range(1): size += 1\nif size == 3: raise ConfigurationError('no')",
    "an early end": "if other(): return\nif size == 3: raise ConfigurationError('no')",
    "a caught error": "try:\n    size = other() or 4\nexcept ValueError: pass\n"
    "if size == 3: raise ConfigurationError('no')",
    "a list of the module": "if size not in KNOWN: raise ConfigurationError('no')",
    "a method": "self.size = size\nself.grow()\nif self.size == 3: raise ConfigurationError('no')",
    "an attribute by name": "self.size = size\nobject.__setattr__(self, 'size', other() or 4)\n"
    "if self.size == 3: raise ConfigurationError('no')",
    "an error that is not ours": "if size == 3: other()\nif size == 4: raise KeyError('no')",
    "an import inside": "from odd_pieces import four as size\nif size == 3: raise ConfigurationError('no')",
    "a branch that is unknown": "if other() is None: size = 4\nif size == 3: raise ConfigurationError('no')",
    "what a base sets": "super().__init__()\nself.size = size\nself.settle()\n"
    "if self.size == 3: raise ConfigurationError('no')",
    "a call in a loop": "for each in (1, 3):\n    self.size = each\n    self.grow()\n"
    "    if self.size == 3: raise ConfigurationError('no')",
    "a match": "match size:\n    case 3: size = 4\nif size == 3: raise ConfigurationError('no')",
}
HEAD = """
from megalight.errors import ConfigurationError
KNOWN = []
KNOWN.append(3)
four = 4
def helper(size):
    return size + len(KNOWN)
def other():
    return None
class Base:
    def grow(self):
        self.size += len(KNOWN)
    def settle(self):
        if other() is None:
            self.size = 4
class Kind(Base):
    def __init__(self, size: int = 1):
"""


@pytest.mark.parametrize("name", PIECES)
def test_nothing_is_concluded_from_what_is_not_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEAD + "\n".join(" " * 8 + line for line in PIECES[name].splitlines())
    (tmp_path / "odd_pieces.py").write_text(dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(walk, "KNOWN", ("odd_pieces", "megalight."))
    monkeypatch.delitem(sys.modules, "odd_pieces", raising=False)
    find_module.cache_clear()
    import odd_pieces  # type: ignore[import-not-found]

    given = {"size": 2 if "helper" in PIECES[name] or "range" in PIECES[name] else 3}
    try:
        odd_pieces.Kind(**given)
        refused = False
    except MegalightError:
        refused = True
    source = find_class("odd_pieces.Kind")
    assert source is not None
    try:
        walk.Walk(source.module).construct(source, given)
    except MegalightError:
        assert refused, "the constructor takes it"
    monkeypatch.delitem(sys.modules, "odd_pieces", raising=False)


def test_values_of_a_command_have_the_kinds_of_the_arguments() -> None:
    classes = {"model": find_class("megalight.models.gpt.module.GPTModule")}
    with pytest.raises(MegalightError, match=r"lr of Adam is -1\.0"):
        constructors.check({"model.optimizer.lr": -1}, classes)
    with pytest.raises(MegalightError, match=r"betas of Adam is \(0.9, 2\)"):
        constructors.check({"model.optimizer.betas.0": 0.9, "model.optimizer.betas.1": 2}, classes)
    constructors.check({"model.optimizer.lr": "fast"}, classes)  # the kind is refused elsewhere


def test_sizes_of_a_model_are_followed_through_methods_and_bases() -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 300, "max_sequence_length": 64}
    source = source_of(GPTConfig)
    walk.Walk(source.module).construct(source, sizes)
    for wrong in (
        {"num_layers": 0},
        {"num_heads": 5},
        {"num_kv_heads": 3},
        {"conv_kernel": 1},
        {"activation": "swish"},
    ):
        with pytest.raises(MegalightError) as there:
            GPTConfig(**{**sizes, **wrong})  # type: ignore[arg-type]
        with pytest.raises(MegalightError) as here:
            walk.Walk(source.module).construct(source, {**sizes, **wrong})
        assert str(here.value) == str(there.value)


def test_every_preset_is_let_through() -> None:
    source = source_of(GPTConfig)
    for preset in (PRESETS[name] for name in PRESETS):
        given = {
            each.name: value if isinstance(value, int | float | str | None) else expressions.UNKNOWN
            for each in fields(preset)
            for value in [getattr(preset, each.name)]
        }
        walk.Walk(source.module).construct(source, given)
