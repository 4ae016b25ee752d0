"""The script that times the parts of a mixture-of-experts layer, on a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import moe_ops


def test_ways_are_checked_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ops.json"
    assert moe_ops.main([str(path), "--small", "--skewed"]) == 0
    result = json.loads(path.read_text())
    parts = {row["part"] for row in result["rows"]}
    assert parts >= {"route, both", "permutation", "permute", "weighted swiglu, both", "product up, forward"}
    assert parts >= {"weight gradient down, written", "weight gradient down, added"}
    ways = {row["way"] for row in result["rows"] if row["part"] == "stack up, tensorwise"}
    assert ways == {"one by one", "cast together", "together"}
    assert all(row["microseconds"] > 0 for row in result["rows"])
    assert "'triton' of permute cannot serve" in capsys.readouterr().out

    def halved(x: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
        return torch.zeros(len(x), x.shape[1] // 2) + 0.5

    monkeypatch.setattr(moe_ops, "gated", halved)
    assert moe_ops.main([str(path), "--small", "--only", "weighted swiglu"]) == 1
    assert any("two kernels differs by" in reason for reason in json.loads(path.read_text())["wrong"])
