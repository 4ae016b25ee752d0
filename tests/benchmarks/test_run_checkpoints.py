"""Saves of a run beside training, timed in all ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "device=cpu precision=fp32 layers=1 hidden=64 ffn=128 heads=2 kv=2 vocab=128 seq=32 mbs=1 micro=1"


@pytest.mark.full
def test_all_ways_save_the_same_bytes_and_bring_them_back(tmp_path: Path) -> None:
    """The script stops with an error if a way brings back other values."""
    result = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/run_checkpoints.py", str(result), "--shape", SMALL]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == 9
    assert len({row["nbytes"] for row in rows}) == 1
    assert all(0 < row["blocked"] <= row["total"] for row in rows)
    beside = {row["way"] for row in rows if row["during"] is not None}
    assert {"megalight persistent", "megalight per_save"} <= beside
    assert not beside & {"disk", "megalight sync", "torch DCP"}
