"""The committed figures of post-training on a GPU: each part did what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import post_training
from tests.support.source import ROOT

RESULT = ROOT / "benchmarks" / "results" / "h100_post_training.json"


def test_the_committed_parts_did_what_they_should() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    parts = [part for part in post_training.PARTS if part not in found.get("cut", "")]
    assert found.keys() >= {"command", "device", *parts}
    assert not any("error" in found[part] for part in parts)
    assert found["chat"]["right"] == found["chat"]["questions"] == len(post_training.questions())
    curves = found["distil"]["val_losses"]
    assert curves["distilled"][-1] < curves["alone"][-1]
    assert found["eagle"]["acceptance_length"] > 1
    assert found["eagle"]["same_as_the_base"] == found["eagle"]["greedy_texts"]
    first, last = found["qlora"]["train_loss_of_ten_steps"]
    assert last < first
    for told in (each for each in found.get("quantize", {}).values() if isinstance(each, dict)):
        assert told["perplexity"] < 1.1 * told["perplexity_before"]
        assert told["transformers"] < 1e-3


def test_a_part_that_fails_is_told_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(run: post_training.Run) -> dict[str, object]:
        raise OSError("no space")

    monkeypatch.setattr(post_training, "PARTS", {"demo": fail, "chat": lambda run: {"steps": run.steps, "ok": True}})
    words = ["result.json", "--steps", "3", "--only", "demo", "chat", "--work", "runs"]
    with pytest.raises(SystemExit):
        post_training.main(["result.json", "--only", "nothing"])
    assert post_training.main(words) == 1
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["demo"]["error"] == "OSError: no space"
    assert found["chat"]["steps"] == 3
