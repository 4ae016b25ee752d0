"""The script that holds a distilled student beside the same student trained alone, and its committed result."""

from __future__ import annotations

import json

from tests.source import ROOT


def test_the_committed_student_beats_the_same_student_alone() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "cpu_distillation.json").read_text(encoding="utf-8"))
    alone, distilled = (result["runs"][name]["val_losses"] for name in ("alone", "distilled"))
    assert len(alone) == len(distilled) == len(result["steps"])
    assert distilled[-1] < alone[-1]
