"""Styles that others bring."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight import registry
from megalight.errors import MegalightError
from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import STYLES, Column
from tests.parallel.gathering import gather_canonical
from tests.parallel.styles.foreign import ContextPair, Pair, SplitPair, plugin
from tests.support.workers import run


def parity(axis: str) -> bool:
    mesh = ParallelMesh(2, dist.get_rank(), **{axis: 2})
    torch.manual_seed(0)
    whole, x, y = nn.Bilinear(3, 5, 6, bias=False).double(), torch.randn(7, 3).double(), torch.randn(7, 5).double()
    model = nn.ModuleDict({"pair": nn.Bilinear(3, 5, 6, bias=False).double()})
    model.load_state_dict({"pair.weight": whole.weight})
    specs = parallelize(model, ParallelizePlan({"pair": Pair() if axis == "tp" else ContextPair()}), mesh)
    assert model["pair"].weight.shape == (3, 3, 5)
    ours = x.clone().requires_grad_()
    theirs = x.clone().requires_grad_()
    out, expected = model["pair"](ours, y), whole(theirs, y)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    if axis == "tp":
        grads = gather_canonical({"pair.weight": model["pair"].weight.grad}, specs, mesh)
        torch.testing.assert_close(grads["pair.weight"], whole.weight.grad)
    else:
        torch.testing.assert_close(model["pair"].weight.grad, whole.weight.grad[mesh.rank("cp") * 3 :][:3])
    return True


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_foreign_style_splits_over_its_own_axis(axis: str) -> None:
    assert all(run(parity, 2, axis))


@pytest.mark.parametrize(("style", "replaced"), [(Pair(), True), (ContextPair(), False)])
def test_modules_stay_where_the_styles_axis_has_one_rank(style: Pair, replaced: bool) -> None:
    model = nn.ModuleDict({"pair": nn.Bilinear(3, 5, 6, bias=False)})
    specs = parallelize(model, ParallelizePlan({"pair": style}), ParallelMesh(2, 1, tp=2))
    assert isinstance(model["pair"], SplitPair) is replaced
    assert specs["pair.weight"].pieces[0].size == (3 if replaced else 6, 3, 5)


class Entry:
    """What ``importlib.metadata`` finds of an installed plugin."""

    name = value = "pairs"

    @staticmethod
    def load() -> object:
        return plugin


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()])
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "SOURCES", Path("nowhere"))
    monkeypatch.setattr(STYLES, "_entries", dict(STYLES._entries))
    registry._plugin_entries.cache_clear()
    yield
    registry._plugin_entries.cache_clear()


def test_a_plan_names_a_style_of_a_plugin(installed: None) -> None:
    plan = ParallelizePlan({"pair": "Pair", "a": "Column", "b": ("Boundary", Column(units=2))})
    assert plan.rules["pair"] == Pair()
    assert plan == ParallelizePlan({"pair": Pair(), "a": Column(), "b": ("Boundary", Column(units=2))})
    assert "Pair()" in repr(plan)


def test_an_unknown_style_is_refused_with_the_known_ones() -> None:
    with pytest.raises(MegalightError, match=r"unknown style 'Colum'; known: .*Column.*Did you mean 'Column'"):
        ParallelizePlan({"a": "Colum"})
