from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import distillation_step


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_the_whole_way_on_tiny_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = distillation_step.main([str(tmp_path / "result.json"), "--tiny", "--folder", str(tmp_path)])
    found = json.loads((tmp_path / "result.json").read_text())
    seconds = {name: row["seconds"] for name, row in found["rows"].items()}
    assert min(seconds.values()) > 0
    assert found["overhead"] == pytest.approx(seconds["distillation"] / (seconds["student"] + seconds["teacher"]) - 1)
    assert code == (0 if found["overhead"] <= found["aim"] else 1)
    assert "overhead" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"result.json"}  # the teacher's weights are gone
