"""Code of the benchmarks that runs on a CPU: counts, clocks, losses and tables."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import ceilings, distillation, moe_ops, sharding_loss
from benchmarks.nvtx import microseconds_per_range
from benchmarks.step import Step
from megalight.cli.verbs.plot import find_logs, read_runs
from tests.support.source import ROOT
from tests.support.workers import run


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


def test_the_committed_student_beats_the_same_student_alone() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "cpu_distillation.json").read_text(encoding="utf-8"))
    alone, distilled = (result["runs"][name]["val_losses"] for name in ("alone", "distilled"))
    assert len(alone) == len(distilled) == len(result["steps"])
    assert distilled[-1] < alone[-1]


def test_curves_are_read_by_plot(tmp_path: Path) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "cpu_distillation.json").read_text(encoding="utf-8"))
    distillation.write_curves(tmp_path, result)
    runs = {run.name: run.curves["val_loss"] for run in read_runs([[file] for file in find_logs(tmp_path)])}
    assert runs.keys() == result["runs"].keys()
    for name, curve in runs.items():
        assert curve[1] == result["runs"][name]["val_losses"]


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


def test_a_range_is_timed() -> None:
    assert microseconds_per_range() > 0


def _losses(path: str) -> int:
    return sharding_loss.main([path, "--size=small", "--steps", "3"])


@pytest.mark.full
def test_all_ways_begin_alike(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    assert run(_losses, 2, str(path)) == [0, 0]
    ways = json.loads(path.read_text())["ways"]
    assert list(ways) == list(sharding_loss.WAYS)
    expected = ways["optim"]
    for found in ways.values():
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=2e-3)
        np.testing.assert_allclose(found["norms"], expected["norms"], rtol=2e-2)
