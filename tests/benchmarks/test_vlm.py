"""The benchmark of vision-language models, small: rows, their count of operations, and what it refuses to time."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import vlm
from benchmarks.peers.megalight import Wrong
from megalight.models.vlm.flops import flops_of_images

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def test_operations_of_the_shapes_are_counted() -> None:
    shape = vlm.SHAPES["llava-1.5"]()
    batch, cuts = shape.batch(0, 2)
    assert (batch.tokens == 32000).sum() == 2 * 576
    assert [len(cut.pixels) for cut in cuts] == [577, 577]
    language = 16 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32064
    tower = 577 * (2 * (23 * 12 * 1024**2 + 588 * 1024) + 4 * 23 * 1024 * 577)
    projector = 577 * (4 * 1024 * 4096 + 6 * 4096**2)
    attention = 6 * 16 * 4096 * 1024
    assert shape.flops() == pytest.approx(16 * (1024 * (6 * language + attention) + tower + projector), rel=2e-3)
    qwen = vlm.SHAPES["qwen2.5-vl"]()
    sizes = [17 * 23, 24 * 36, 16 * 16]
    assert [cut.features for cut in qwen.batch(0, 1)[1]] == sizes
    assert qwen.flops() > 8 * flops_of_images(qwen.config, [4 * size for size in sizes]) / 3


@pytest.mark.parametrize("row", [row for row in vlm.ROWS if "fp8" not in row])
def test_a_row_on_the_cpu(row: str) -> None:
    found = vlm.measure(row, "cpu", unchecked=False)
    assert found["checks"]["twin_difference"] < vlm.TOLERANCE["fp32"]
    losses = found["checks"]["twin_losses"]
    assert losses[-1] < 0.999 * losses[0]  # it learns, so that steps matter
    assert found["seconds"] > 0
    assert found["tflops"] * found["seconds"] > 0


@pytest.mark.full
def test_rows_in_processes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert vlm.main([str(path), "--small", "--rows", "llava-1.5, megalight fp8", "llava-1.5, transformers"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["row"] for row in rows] == ["llava-1.5, megalight fp8", "llava-1.5, transformers bf16"]
    assert "x transformers" in vlm.table(rows)


def test_what_is_wrong_is_not_timed() -> None:
    def wrong(*arguments: object, **options: object) -> None:
        arguments[4](mock.Mock(report=mock.Mock(loss=1.0)))  # type: ignore[operator]

    with mock.patch.object(vlm, "train", wrong), mock.patch.object(vlm, "CHECKED_STEPS", 1), pytest.raises(Wrong):
        vlm.check(vlm.SHAPES["llava-1.5"](), "megalight", "fp32", "cpu")
