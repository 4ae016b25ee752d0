"""The script that times sequence mixers, on tiny shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import mixers
from benchmarks.mixing import attention, mamba

DELTA = "Gated DeltaNet layer"


def of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_attention_is_checked_timed_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mixers.json"
    assert mixers.main([str(path), "--small", "--only", "attention", "--ways", "torch", "auto", "varlen"]) == 0
    result = of(path)
    rows = {(row["case"], row["way"]): row for row in result["rows"]}
    assert rows["plain", "torch"]["share"] == 1.0
    assert {case for case, _ in rows} >= {"window 16", "sinks", "soft cap", "few long, many short", "layer, window 16"}
    assert all(row["forward"] > 0 and row["both"] > 0 for row in rows.values())
    assert [line.partition(":")[0] for line in result["said"]] == ["layer, window 16", "layer, window 64"]
    assert "attention: plain: varlen: needs tensors on cuda, not on cpu" in " ".join(result["refused"])

    real = attention.attention

    def blind(*args: Any, backend: str, window: int | None = None, **options: Any) -> torch.Tensor:
        return real(*args, backend=backend, window=window if backend == "reference" else None, **options)

    monkeypatch.setattr(attention, "attention", blind)  # it forgets the window
    words = [str(path), "--small", "--only", "attention", "--cases", "window 16", "--ways", "auto"]
    assert mixers.main(words) == 1
    assert any("window 16: auto: WRONG" in reason for reason in of(path)["refused"])


@pytest.mark.full
def test_layers_equal_those_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "mixers.json"
    words = [str(path), "--small", "--only", "mla", "mamba", "--cases", "layer", "--ways", "auto", "transformers"]
    assert mixers.main(words) == 0
    rows = {(row["group"], row["case"], row["way"]) for row in of(path)["rows"]}
    expected = {("mla", "layer"), ("mamba", "Mamba-2 layer"), ("mamba", "hybrid, 9 layers"), ("mamba", DELTA)}
    assert rows == {(*case, way) for case in expected for way in ("auto", "transformers")}


def test_operations_are_those_of_the_models_rule() -> None:
    shapes = mamba.Shapes(True, "cpu")
    config, tokens = shapes.config, 96
    sizes = shapes.mamba
    matmul = 4 * (32 * (2 * sizes.inner_size + sizes.conv_size + sizes.num_heads) + sizes.conv_size * 4)
    matmul += 32 * (2 * 32 + 2 * 16) + 4 * 2 * 32 * 64
    scan = 4 * (64 * (2 * 16 + sizes.inner_size) + 2 * sizes.inner_size * 16)
    expected = tokens * 6.0 * (matmul + scan + config.num_heads * 2 * config.head_dim * tokens / 2)
    assert mamba.layer_flops(config, tokens) == pytest.approx(expected)
    assert attention.pairs([5, 3], None) == 15 + 6
    assert attention.pairs([5], 1) == 1 + 2 * 4
