"""Arguments read from source files agree with those of the imported classes."""

import importlib

import pytest

from megalight import callbacks
from megalight.cli import config_args, signatures
from megalight.cli.lightning import NAMED
from megalight.cli.signatures import find_class, find_module
from megalight.cli.unknown_keys import MODULES, START
from megalight.models.family import families

CLASSES = [
    *START.values(),
    *(f"megalight.callbacks.{name}" for name in callbacks.__all__ if name != "WholeModelSummary"),
    *(f"{kind.__module__}.{kind.__name__}" for kind in NAMED),
    "megalight.models.gpt.GPTConfig",
    "megalight.models.bert.BertModule",
    "megalight.optim.Cosine",
    "lightning.pytorch.callbacks.ModelCheckpoint",
    "tests.cli.samples.SampleModule",
    "tests.cli.samples.TornData",
]


@pytest.mark.parametrize("path", CLASSES)
def test_the_source_and_the_class_have_the_same_arguments(path):
    module, _, name = path.rpartition(".")
    found = find_class(path)
    assert found is not None
    assert found.name == name
    arguments = signatures.members(found)
    assert arguments is not None
    assert set(arguments) == set(config_args.members(getattr(importlib.import_module(module), name)))


def test_every_named_class_is_found_by_its_bare_name():
    for kind in (*NAMED, *(family.module() for family in families())):
        found = find_class(kind.__name__, MODULES)
        assert found is not None
        assert found.module.name == kind.__module__


SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union
import other
KIND = Union[Literal["a", "b"], int]

@dataclass
class Inner:
    size: int = 3

class Base:
    def __init__(self, base: bool = True): ...

class Child(Base):
    def __init__(self, kind: KIND, ratio: "float | None", any, inner: Optional[Inner] = None, **kwargs): ...

class Loose(Base):
    def __init__(self, **kwargs): ...

class Elsewhere(other.Thing):
    def __init__(self, a: int, **kwargs): ...

class Bare:
    def __init__(self, a: int, **kwargs): ...
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "scratch_of_user.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    find_module.cache_clear()
    yield "scratch_of_user"
    find_module.cache_clear()


def members(path):
    found = find_class(path)
    assert found is not None
    return signatures.members(found)


def test_annotations_aliases_and_inherited_arguments(place):
    arguments = members(f"{place}.Child")
    assert list(arguments) == ["base", "kind", "ratio", "any", "inner"]
    kind, ratio = arguments["kind"], arguments["ratio"]
    assert (kind.scalars, kind.choices, kind.optional) == ({int}, ("a", "b"), False)
    assert (ratio.scalars, ratio.choices, ratio.optional) == ({float}, (), True)
    assert arguments["base"].scalars == {bool}
    assert not arguments["any"].complete
    assert arguments["inner"].source.name == "Inner"
    assert members(f"{place}.Loose") == {"base": arguments["base"]}


@pytest.mark.parametrize("name", ["Elsewhere", "Bare"])
def test_what_the_source_does_not_tell_is_unknown(place, name):
    assert members(f"{place}.{name}") is None


@pytest.mark.parametrize("path", ["absent.Thing", "json.Absent", "math.sin", "megalight.nowhere.Class", "Nothing"])
def test_classes_that_cannot_be_found(path):
    assert find_class(path) is None
