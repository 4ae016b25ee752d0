"""The script that times the parts of a linear layer in 8 bits, on tiny shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import low_precision_ops


def test_ways_are_checked_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ops.json"
    assert low_precision_ops.main([str(path), "--small", "--sweep"]) == 0
    result = json.loads(path.read_text())
    parts = {row["part"] for row in result["rows"]}
    assert parts >= {
        "amax",
        "amax + cast",
        "cast",
        "transpose quantized values",
        "forward",
        "input gradient",
        "weight gradient",
    }
    assert all(row["microseconds"] > 0 for row in result["rows"])
    assert any("cublaslt" in reason for reason in result["refused"])

    monkeypatch.setattr(low_precision_ops, "amax_of", lambda x: x.abs().amax() * 1.5)
    _, refused = low_precision_ops.measured(low_precision_ops.ways(64, True, "cpu"), "cpu")
    assert any("amax" in reason and "WRONG" in reason for reason in refused)
    assert any(reason.startswith("cast, ") and "WRONG" in reason for reason in refused)
