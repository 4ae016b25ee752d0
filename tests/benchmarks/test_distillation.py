"""The script that holds a distilled student beside the same student trained alone, and its committed result."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import distillation
from megalight.cli.verbs.plot import find_logs, read_runs
from tests.support.source import ROOT


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
