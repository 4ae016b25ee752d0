"""The arguments of ``megalight quantize``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalight.cli import main

PRESET = "INT8_DEFAULT_CFG"
PRESETS = ["--preset", PRESET, "--kv", "FP8_KV_CFG"]


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("trainer: {max_steps: 1}")


@pytest.mark.parametrize("words", [["OUT", *PRESETS], [*PRESETS, "OUT"]])
def test_what_follows_two_dashes_is_passed_on(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[list[str]] = []

    def record(given: list[str]) -> int:
        passed.append(given)
        return 0

    command = main.main
    monkeypatch.setattr(main, "main", record)
    output = str(tmp_path / "out")
    words = [output if word == "OUT" else word for word in words]
    assert command(["quantize", *words, "--", "-c", "recipe.yaml", "--trainer.devices=1"]) == 0
    ((*first, callback),) = passed
    assert first == ["validate", "-c", "recipe.yaml", "--trainer.devices=1"]
    values = json.loads(callback.removeprefix("--trainer.callbacks+="))["init_args"]
    expected = {"preset": PRESET, "head": False, "kv": "FP8_KV_CFG", "measure": True, "save_to": output}
    assert values == {**expected, "layers": None}


def test_a_search_runs_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[list[str]] = []
    command = main.main

    def record(given: list[str]) -> int:
        passed.append(given)
        return 0

    monkeypatch.setattr(main, "main", record)
    output = str(tmp_path / "out")
    formats = ["INT4_AWQ_CFG", "FP8_DEFAULT_CFG"]
    assert command(["quantize", output, "--auto", *formats, "--effective-bits", "6", "--", "-c", "recipe.yaml"]) == 0
    first, second = (json.loads(each[-1].removeprefix("--trainer.callbacks+=")) for each in passed)
    found = f"{output}.layers.json"
    assert first["class_path"].endswith(".AutoQuantize")
    assert first["init_args"] == {"formats": formats, "output": found, "effective_bits": 6.0, "exclude": []}
    assert second["init_args"]["layers"] == found
    assert second["init_args"]["save_to"] == output


def test_an_address_of_remote_storage_is_passed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[list[str]] = []
    command = main.main

    def record(given: list[str]) -> int:
        passed.append(given)
        return 0

    monkeypatch.setattr(main, "main", record)
    assert command(["quantize", "memory://quantize/out", "--", "-c", "recipe.yaml"]) == 0
    values = json.loads(passed[0][-1].removeprefix("--trainer.callbacks+="))["init_args"]
    assert values["save_to"] == "memory://quantize/out"
