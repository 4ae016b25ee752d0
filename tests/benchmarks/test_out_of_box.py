"""The script that times what users get without tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import out_of_box


@pytest.mark.full
def test_tiny_rows(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert out_of_box.main([str(path), "--tiny", "--seconds", "600", "--limit", "300"]) == 0
    result = json.loads(path.read_text())
    assert {part: [row["row"] for row in rows] for part, rows in result["parts"].items()} == out_of_box.rows_of(True)
    assert list(result["ratios"]["demo, tiny"]) == ["out of the box / 4 at once"]
    assert "| out of the box |" in path.with_suffix(".md").read_text()


def test_rows_that_train_something_else_are_no_result() -> None:
    rows = [
        {"row": "out of the box", "loss": 4.0, "tokens_per_second": 5.0, "peak_gib": 1.0},
        {"row": "graph, 8 at once", "loss": 4.001, "tokens_per_second": 4.0, "peak_gib": 1.0},
        {"row": "graph, 9 at once", "loss": 4.5, "tokens_per_second": 40.0, "peak_gib": 1.0},
    ]
    out_of_box.check(rows)
    assert [row.get("failed") for row in rows[:2]] == [None, None]
    assert rows[2]["failed"] == "its first loss 4.5000 differs from 4.0000 by 1.2e-01"
    assert out_of_box.ratios("gpt2_small", rows) == {"out of the box / graph, 8 at once": 1.25}
    record = {"command": "c", "device": "d", "parts": {"gpt2_small": rows}, "ratios": {"gpt2_small": {}}}
    assert "| graph, 9 at once | 40 | 1.0 | 4.5000 | its first loss" in out_of_box.table(record)


def test_shapes_are_the_same_by_hand_and_in_transformers() -> None:
    for shape in (*out_of_box.SHAPES.values(), *out_of_box.TINY_SHAPES.values()):
        step = out_of_box.Step().but(shape.step)
        for name, word in (("layers", "num_layers"), ("hidden", "hidden_size"), ("heads", "num_heads")):
            words = dict(word.split("=") for word in shape.words.split())
            if f"--model.config.{word}" in words:
                assert int(words[f"--model.config.{word}"]) == getattr(step, name)
