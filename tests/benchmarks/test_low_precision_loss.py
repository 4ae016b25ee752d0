"""The script that holds losses in 8 bits beside those of bf16, small and emulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import low_precision_loss
from megalight.errors import BackendError


@pytest.mark.full
def test_recipes_beside_bf16(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    words = [
        str(path),
        "--size=small",
        "--steps",
        "30",
        "--bound",
        "0.03",
        "--recipes",
        "tensorwise",
        "tensorwise+primary",
    ]
    assert low_precision_loss.main(words) == 0
    result = json.loads(path.read_text())
    bf16, nudged, tensorwise, primary = result["runs"]
    assert bf16["difference"] == 0
    assert nudged["losses"] != bf16["losses"]
    assert tensorwise["losses"] != bf16["losses"]
    assert primary["losses"] != bf16["losses"]
    for run in result["runs"]:
        assert len(run["losses"]) == 30
        assert run["last"] < run["losses"][0] - 1
    assert low_precision_loss.main([*words[:3], "20", "--bound", "1e-9", "--recipes", "delayed"]) == 1


def test_a_recipe_without_products_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(recipe: str, *_: Any) -> dict[str, Any]:
        if recipe == "nvfp4":
            raise BackendError("no products here")
        return {"recipe": recipe, "losses": [2.0, 1.0], "seconds_per_step": 0.1}

    monkeypatch.setattr(low_precision_loss, "train", train)
    path = tmp_path / "loss.json"
    assert low_precision_loss.main([str(path), "--size=small", "--recipes", "nvfp4", "delayed"]) == 0
    result = json.loads(path.read_text())
    assert result["refused"] == {"nvfp4": "no products here"}
    assert [run["recipe"] for run in result["runs"]] == ["bf16", "bf16 nudged", "delayed"]


def test_a_device_without_products_emulates_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(recipe: str, size: Any, steps: int, text: Any, device: str, emulate: bool) -> dict[str, Any]:
        if recipe == "nvfp4" and not emulate:
            raise BackendError("no products here")
        return {"recipe": recipe, "emulated": emulate, "losses": [2.0, 1.0], "seconds_per_step": 0.1}

    monkeypatch.setattr(low_precision_loss, "train", train)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    path = tmp_path / "loss.json"
    assert low_precision_loss.main([str(path), "--size=small", "--recipes", "nvfp4", "delayed"]) == 0
    result = json.loads(path.read_text())
    assert result["refused"] == {"nvfp4": "no products here"}
    assert {run["recipe"]: run["emulated"] for run in result["runs"][2:]} == {"nvfp4": True, "delayed": False}


def test_a_loss_that_is_no_number_does_not_pass() -> None:
    runs = [{"recipe": "bf16", "losses": [2.0] * 10}, {"recipe": "mxfp8", "losses": [2.0] * 9 + [float("nan")]}]
    low_precision_loss.verdicts(runs, 0.5)
    assert [run["passed"] for run in runs] == [True, False]
