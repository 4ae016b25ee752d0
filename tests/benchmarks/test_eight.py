"""Rows of eight GPUs: the page has what the command predicts, and their layouts train tiny models on eight ranks."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import dense_step
from benchmarks.eight import EIGHT, bubble_of, predict, table
from benchmarks.rows import ROWS
from tests.support.source import ROOT
from tests.support.workers import run

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
    run(_measure, 8, ["--unchecked", "--out", str(out), *tiny.words()], timeout=240)
    assert json.loads(out.read_text())["rows"][0]["seconds"] > 0


def _measure(words: list[str]) -> None:
    """Do as a rank that torchrun has started. Its own start is in test_bench.py."""
    launched = {"LOCAL_RANK": os.environ["RANK"], "TORCHELASTIC_RUN_ID": "eight"}
    with patch.dict(os.environ, launched), patch.object(sys, "argv", ["benchmarks/dense_step.py", *words]):
        dense_step.main()
