"""Rows of eight GPUs: the page has what the command predicts, and their layouts train tiny models on eight ranks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.eight import EIGHT, bubble_of, predict, table
from benchmarks.rows import ROWS
from tests.support.source import ROOT

TINY = "device=cpu layers=4 hidden=64 ffn=96 heads=8 kv=4 dim=16 vocab=256 steps=1 warmup=1 recompute= backends= graph="


def test_the_page_has_the_predictions():
    assert table() in (ROOT / "docs/performance/eight-gpus.md").read_text()


def test_a_row_with_the_layout_of_its_measured_one_keeps_its_figure():
    for name in EIGHT:
        row = ROWS[name]
        known = ROWS[row.like]
        measured = json.loads((ROOT / f"benchmarks/results/{row.like}.json").read_text())["rows"][0]["tflops"]
        assert predict(replace(known, like=row.like)).tflops == pytest.approx(measured)
        assert predict(row).tflops < predict(row).bound
    assert bubble_of(ROWS["llama3-8b-tp4pp2"].step) == pytest.approx(1 / 17)


@pytest.mark.full
@pytest.mark.parametrize("name", EIGHT)
def test_its_layout_trains(name: str, tmp_path: Path) -> None:
    step = ROWS[name].step
    tiny = step.but(TINY + f" seq={128 * step.cp} micro={min(4, step.micro)} mbs=1 precision=fp32 recipe=tensorwise")
    if step.pp > 1:
        tiny = replace(tiny, layout="Ett|ttL")
    if step.experts:
        tiny = replace(tiny, experts=8, topk=2)
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    command += ["benchmarks/dense_step.py", "--unchecked", "--out", str(out), *tiny.words()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(out.read_text())["rows"][0]["seconds"] > 0
