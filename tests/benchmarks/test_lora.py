"""The script that holds our adapters beside those of peft: its arithmetic, and the whole way on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import lora
from benchmarks.peers import load
from benchmarks.peers.megalight import one_device
from benchmarks.rows import ROWS
from benchmarks.step import Step
from tests.support.interpreters import environment

SMALL = Step(layers=3, hidden=8, ffn=20, heads=4, kv=2, vocab=50, seq=16, rank=2, device="cpu")


def test_adapters_are_counted_as_the_model_has_them() -> None:
    trained = sum(p.numel() for p in one_device(SMALL).parameters() if p.requires_grad)
    assert SMALL.adapter_weights == SMALL.trained_weights == trained
    frozen = SMALL.matmul_weights
    assert SMALL.flops_per_token == 4 * frozen + 6 * trained + SMALL.attention_flops_per_token


def test_the_fastest_peer_counts() -> None:
    names, rates, memory = ("megalight", "peft", "peft-compile", "failed"), (26.0, 10.0, 20.0), (9.0, 8.0, 10.0)
    rows = [
        {"peer": name, "tokens_per_second": rate, "peak_gib": gib, "seconds": 1.0}
        for name, rate, gib in zip(names, rates, memory, strict=False)
    ]
    beside = {**rows[0], "peer": "megalight base=int8", "tokens_per_second": 99.0}
    found = lora.compare([*rows, beside, {"peer": "failed", "failed": "no memory"}])
    assert found == {
        "best_peer": "peft-compile", "times_tokens_per_second": 1.3, "times_memory": 0.9, "met": True,
    }  # fmt: skip
    with pytest.raises(SystemExit, match="nothing to compare"):
        lora.compare([{"peer": "megalight", "failed": "no memory"}, *rows[1:]])


def test_rows_are_of_the_shape_that_is_asked_for() -> None:
    rows = lora.rows_of(16, tiny=False)
    assert [peer for peer, _ in rows] == [
        "megalight",
        "peft",
        "peft-compile",
        "peft-compile-bf16",
        "megalight",
        "megalight",
    ]
    assert [row.step.base for _, row in rows] == ["", "", "", "", "int8", "nf4"]
    assert {(row.step.layers, row.step.vocab, row.step.seq, row.step.rank) for _, row in rows} == {
        (16, 128256, 4096, 16)
    }
    for peer in ("peft", "peft-compile-bf16"):
        assert load(peer).why_not(rows[0][1].step) is None
    assert "rank=0" in (load("peft").why_not(Step()) or "")
    assert "no rank" in (load("hf").why_not(ROWS["llama3-8b-lora"].step) or "")


def test_the_frozen_weights_of_the_peer_are_in_bf16() -> None:
    from benchmarks.peers.low_rank import adapted

    step = ROWS["tiny-cpu-lora"].step.but("precision=bf16")
    for half, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        model = adapted(step, half)
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_whole_way_on_a_tiny_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "PYTHON_EXEC"):
        monkeypatch.setenv(name, environment()[name])
    monkeypatch.setattr(sys, "executable", environment()["PYTHON_EXEC"])
    assert lora.main([str(tmp_path / "out.json"), "--tiny"]) in (0, 1)  # a rate on a CPU decides nothing
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    ours, theirs, *stored = result["rows"]
    assert (ours["peer"], theirs["peer"]) == ("megalight", "peft")
    assert [row["peer"] for row in stored] == ["megalight base=int8", "megalight base=nf4"]
    assert all(row["checks"]["twin_difference"] < 1e-5 for row in stored)
    assert ours["checks"]["twin_difference"] < 1e-5
    assert ours["checks"]["twin_losses"][-1] < ours["checks"]["twin_losses"][0] - 0.05  # adapters learn
    assert result["comparison"]["best_peer"] == "peft"
    assert f"{result['comparison']['times_tokens_per_second']:.2f} x peft" in capsys.readouterr().out
