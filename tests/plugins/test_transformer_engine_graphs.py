"""Layers handed to TransformerEngine's ``make_graphed_callables``, played by a fake that keeps to its contract."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalight.callbacks import CUDAGraph
from megalight.errors import ConfigurationError
from megalight.models.gpt import DropoutConfig
from megalight.parallel.precision import LowPrecisionOptions
from megalight.plugins.precision import MegatronLowPrecision
from megalight.plugins.transformer_engine.graphs import WARM_UPS, graphs_why_not
from tests.parallel.graphs.tape import Tape
from tests.plugins import quantizers
from tests.plugins.fakes import Fakes, pretend_cuda
from tests.plugins.graphed import make_graphed_callables
from tests.strategies.training import BASE, assert_same_run, fit
from tests.support.workers import run

STEPS = 4
NEVER = 1000
DROPPING = replace(BASE, num_layers=4, dropout=DropoutConfig(hidden=0.2))


def train(
    folder: str,
    config: Any,
    scope: Any,
    warmup: int,
    layout: dict[str, Any],
    backend: str = "transformer_engine",
    recipe: str | None = None,
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        pretend_cuda(patch)
        fakes = Fakes(Path(folder), patch)
        quantizers.install(fakes)
        fakes.add("transformer_engine.pytorch", make_graphed_callables=make_graphed_callables)
        callback = CUDAGraph(scope, warmup_steps=warmup, backend=backend)
        callback.recorder = Tape()
        if recipe is not None:
            plugin = MegatronLowPrecision(LowPrecisionOptions(recipe), "32-true", "transformer_engine")
            layout = {**layout, "trainer_options": {"precision": None}, "precision_plugin": plugin}
        found = fit(config, STEPS, extra_callbacks=[callback], **layout)
        given = [kwargs for name, _, kwargs in fakes.calls if name == "make_graphed_callables"]
    return {**found, "replays": callback.replays, "reasons": callback.reasons, "given": given}


LAYOUTS: dict[str, tuple[str, int, dict[str, Any], list[int]]] = {
    "one device": ("layer", 1, {"micro_batch_size": 2}, [1, -1, 1, -1]),
    "attention": ("attention", 1, {"micro_batch_size": 2}, [1, -1, 1, -1]),
    "dp": ("layer", 2, {"micro_batch_size": 1, "options": {"bucket_size": 4000}}, [1, -1, 1, -1]),
    "vpp": (
        "layer",
        2,
        {"micro_batch_size": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
        [1, 1, 2, 2, -2, -2, -1, -1],
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name == "dp")) for name in LAYOUTS])
def test_trains_as_eager_steps_do(tmp_path: Path, name: str) -> None:
    scope, ranks, layout, order = LAYOUTS[name]
    config = BASE if scope == "attention" else DROPPING
    expected = run(train, ranks, str(tmp_path), config, scope, NEVER, layout)
    found = run(train, ranks, str(tmp_path), config, scope, 2, layout)
    for here, there in zip(found, expected, strict=True):
        assert here["reasons"] == []
        layers = config.num_layers // (2 if name == "vpp" else 1)
        assert here["replays"] == (STEPS - 2) * 2 * layers
        (given,) = here["given"]
        assert given["num_warmup_iters"] == WARM_UPS
        assert there["given"] == []
        assert_same_run(here, there, 1e-12)
        assert sorted(given["_order"]) == sorted(order)


LOW_PRECISION = replace(BASE, hidden_size=64, ffn_hidden_size=64), {"micro_batch_size": 2}


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of a recipe that records nothing, whatever could record it."""
    folder = str(tmp_path_factory.mktemp("eager"))

    @functools.cache
    def train_eagerly(recipe: str) -> dict[str, Any]:
        config, layout = LOW_PRECISION
        return dict(run(train, 1, folder, config, "layer", NEVER, layout, "own", recipe)[0])

    return train_eagerly


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize(
    ("backend", "scope"),
    [("transformer_engine", "layer"), ("own", "layer"), pytest.param("own", "iteration", marks=pytest.mark.full)],
)
def test_its_low_precision_trains_as_in_eager_steps(
    tmp_path: Path, eager: Any, backend: str, scope: str, recipe: str
) -> None:
    config, layout = LOW_PRECISION
    found = run(train, 1, str(tmp_path), config, scope, 2, layout, backend, recipe)[0]
    assert found["reasons"] == []
    assert found["replays"] == (STEPS - 2) * (1 if scope == "iteration" else 2 * config.num_layers)
    assert_same_run(found, eager(recipe), 1e-12)


def test_generators_of_ones_own_are_refused(tmp_path: Path) -> None:
    layout = {"micro_batch_size": 2, "tensor_parallel": 2, "sequence_parallel": True}
    found = run(train, 2, str(tmp_path), DROPPING, "layer", 2, layout)
    assert found[0]["replays"] == 0
    assert "its own random generators alone" in found[0]["reasons"][0]


def test_versions_and_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    assert "not installed" in (graphs_why_not("cuda") or "")
    fakes = Fakes(tmp_path, monkeypatch)
    fakes.add("transformer_engine", "2.11.0")
    assert "needs transformer_engine >= 2.12, found 2.11.0" in (graphs_why_not("cuda") or "")
    fakes.add("transformer_engine", "2.13.0")
    fakes.add("transformer_engine.pytorch")
    assert "has no make_graphed_callables" in (graphs_why_not("cuda") or "")


def test_a_whole_step_is_no_module() -> None:
    with pytest.raises(ConfigurationError, match="not scope='iteration'"):
        CUDAGraph("iteration", backend="transformer_engine")
