"""The script that measures what a device can sustain: its counts and its clock."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import ceilings
from benchmarks.step import Step


def test_every_kind_of_work_has_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ceilings.main([str(path), "--small", "--seconds", "0.05"])
    record = json.loads(path.read_text())
    assert list(record["rates"]) == ["gemm", "gemm_fp8", "attention", "memory"]
    assert all(rate > 0 for rates in record["rates"].values() for rate in rates.values())


def test_sustained_is_the_rate_of_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += 1.0 if clock[0] < 50 else 2.0  # half as fast after a while

    found = ceilings.measure((8.0, call), Step(device="cpu"), 300.0)
    assert found == {"burst": 8.0, "sustained": 4.0}


def test_amounts_are_counted() -> None:
    assert ceilings.products("cpu", 16)[0] == 2 * 16**3 == ceilings.products_fp8("cpu", 16)[0]
    assert ceilings.copies("cpu", 64)[0] == 128
    # Forward has two products and backward four, of which a causal mask leaves half.
    assert ceilings.attentions("cpu", 8)[0] == 2 * (6 * 2 * 32 * 8 * 8 * 128) / 2
