"""The account of memory under full sharding: what was measured, and what each option takes away."""

from __future__ import annotations

import json

import pytest

from benchmarks import sharding_memory
from benchmarks.full_sharding import FULL, SHAPES, TIMED
from benchmarks.step import Step
from tests.support.source import ROOT

STEP = Step().but(f"{SHAPES['llama3']} {TIMED} layers=16 level={FULL}")
BF16 = "sharding=gradient_dtype:bfloat16,reduce_scatter_with_fp32_accumulation:true"


def test_the_sum_is_what_was_measured() -> None:
    """What CUDA, NCCL and temporary tensors take is not counted: less than one percent."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "llama3-16l-dp2-full.json").read_text())["rows"]
    measured = next(row["peak_gib"] for row in rows if row["peer"] == "megalight")
    found = sum(sharding_memory.parts(STEP, 2).values()) / sharding_memory.GIB
    assert found == pytest.approx(measured, rel=0.01)
    assert found < measured


def test_each_option_takes_away_its_part() -> None:
    plain, narrow = (sharding_memory.parts(STEP.but(words), 2) for words in ("", BF16))
    changed = {name for name in plain if plain[name] != narrow[name]}
    assert changed == {"buffers of gradients"}  # sums stay in float32
    assert narrow["buffers of gradients"] == plain["buffers of gradients"] / 2
    less = sharding_memory.parts(STEP.but("recompute=mlp.act"), 2)
    assert plain["kept by layers"] - less["kept by layers"] == 2 * 4096 * 16 * 14336
    slots = sharding_memory.parts(STEP.but("sharding=reductions:auto"), 2)["slots of sums"]
    assert slots == 2 * 64 * 2**20


def test_what_is_not_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute=mlp is not counted"):
        sharding_memory.parts(STEP.but("recompute=mlp"), 2)
    with pytest.raises(ValueError, match="experts=8 are not counted"):
        sharding_memory.parts(STEP.but("experts=8"), 2)


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    sharding_memory.main(["--gpus", "4", "--but", "layers=32"])
    printed = capsys.readouterr().out
    assert "| masters | 7.48 |" in printed
    assert "| sum | " in printed
