"""Every example runs as its first lines say, on one device and on two, and learns."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_program
from tests.support.source import ROOT

EXAMPLES = ROOT / "examples"
LEARNED = {
    "plain_lightning": 0.1,
    "own_model": 0.2,
    "own_transformer": 0.2,
    "transformers_llama": 0.6,
    "llama_pipeline": 0.6,
    "gpt_from_python": 5.5,
    "fully_shard_trainer": 0.2,
}
"""Validation loss below which an example has learned; untrained they are at 0.5, 1.1, 4.2, 4.2, 4.2, 6.2 and 4.2."""
SPLIT = {
    "own_model": "--tensor-parallel 2",
    "own_transformer": "--tensor-parallel 2 --sequence-parallel",
    "transformers_llama": "--tensor-parallel 2 --sequence-parallel",
    "llama_pipeline": "--pipeline-parallel 2 --virtual-pipeline 2",
    "gpt_from_python": "--tensor-parallel 2",
}
"""How those that split their model do it over two devices."""
OFTEN = ("plain_lightning",)
"""Those that run on two devices in every test run, and on one in whole ones: replicas.

Pipelines do in test_llama_pipeline.py, and modules with plans of their own do in ``docs/from-lightning.md`` and
``docs/transformers.md``, and sharded parameters in test_sharding.py.
"""
ELSEWHERE = (*OFTEN, "fully_shard_trainer", "llama_pipeline", "own_transformer", "transformers_llama")


def rows(left_out: Collection[str]) -> list[Any]:
    """All examples; whole test runs alone have some of them."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name in left_out)) for name in LEARNED]


LOSS = re.compile(r"^validation loss: (.*)$", re.MULTILINE)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*smaller than the logging interval:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty",
)


def words(name: str, tmp_path: Path, devices: int) -> list[str]:
    found = ["--accelerator", "cpu", "--devices", str(devices)]
    if devices > 1:
        found += SPLIT.get(name, "").split()
    return found + (["--output", str(tmp_path), "--steps", "30"] if name == "gpt_from_python" else [])


_one_device: dict[str, float] = {}


@pytest.fixture
def one_device(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> float:
    """The loss that an example prints on one device, run once in this process."""
    name = request.node.callspec.params["name"]
    if name not in _one_device:
        monkeypatch.setattr(sys, "argv", [name, *words(name, tmp_path / "one", 1)])
        importlib.import_module(name).main()
        (_one_device[name],) = map(float, LOSS.findall(capsys.readouterr().out))
    return _one_device[name]


@pytest.mark.parametrize("name", rows(ELSEWHERE))
def test_it_learns_on_one_device(name: str, one_device: float) -> None:
    assert one_device < LEARNED[name]


@pytest.mark.parametrize("name", rows(LEARNED.keys() - set(OFTEN)))
def test_it_learns_on_two_devices(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    printed = run_program(f"{EXAMPLES / name}.py", *words(name, tmp_path / "two", 2), folder=tmp_path)
    (loss,) = map(float, LOSS.findall(printed))  # told once
    assert loss < LEARNED[name]
    if name in SPLIT:  # the same global batches, split otherwise
        assert loss == pytest.approx(request.getfixturevalue("one_device"), rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("name", ["own_transformer"])
@pytest.mark.parametrize(
    "layout",
    [
        "--devices 2 --pipeline-parallel 2 --virtual-pipeline 2",
        "--devices 2 --context-parallel 2",
        "--devices 4 --tensor-parallel 2 --sequence-parallel --context-parallel 2",
        "--devices 4 --tensor-parallel 2 --pipeline-parallel 2",
    ],
)
def test_an_own_transformer_is_the_same_in_every_layout(
    name: str, layout: str, tmp_path: Path, one_device: float
) -> None:
    printed = run_program(f"{EXAMPLES / name}.py", "--accelerator", "cpu", *layout.split(), folder=tmp_path)
    (loss,) = map(float, LOSS.findall(printed))
    assert loss == pytest.approx(one_device, rel=1e-3)


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *LEARNED,
        "bridge",
        "demo",
        "fully_shard_llama",
        "picture_answers",
        "pictures",
        "plain_loop",
        "towers",
    }
