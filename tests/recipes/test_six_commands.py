"""From a name of the Hub to a fine-tuned, evaluated model: the commands of docs/evaluate.md, on a local hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalight.cli.main import main
from tests.evaluation.samples import save_model, save_tasks
from tests.recipes.test_named import TINY
from tests.support.hub import Hub, read_from, serving

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAME = "owner/tiny"
RUN = "runs/gpt2_small-lora-1xGPU"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    save_model(tmp_path / "published", width=64, double=False)
    with serving() as server:
        server.add(NAME, tmp_path / "published")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        read_from(server, tmp_path / "cache", monkeypatch)
        yield server


def test_from_a_name_to_an_evaluated_model(hub: Hub, tmp_path: Path) -> None:
    tasks = save_tasks(tmp_path / "tasks")
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "the moon"}]}
        for word in ("cat", "dogs", "hills", "ball") * 10
    ]
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def megalight(*words: str) -> None:
        assert main([*words]) == 0

    scored = ["--tasks", "endings", "--include-path", str(tasks), "--bootstrap-iters", "0", "--device", "cpu"]
    megalight("evaluate", NAME, *scored, "--out", "before.json")
    megalight("prepare", "--chat", "chat.jsonl", "--tokenizer", NAME, "--output", "data/chat", "-q")
    words = [
        *TINY,
        "--trainer.devices=1",
        f"--model.weights={NAME}",
        "--data.data=data/chat",
        "--model.optimizer.lr=0.01",
    ]
    megalight("fit", "-c", "gpt2_small-lora-1xGPU", *words, "--model.optimizer.schedule.warmup=1")
    megalight("merge", RUN, "--base", NAME, "--output", "tuned")
    megalight("evaluate", "tuned", *scored, "--out", "after.json")
    megalight("generate", "tuned", "--chat", "--prompt", "cat", "-n", "4", "-t", "0")
    before, after = (json.loads(Path(f"{name}.json").read_text())["results"] for name in ("before", "after"))
    assert before["endings"]["perplexity,none"] != after["endings"]["perplexity,none"]
    # The weights came once.
    assert hub.served["model.safetensors"] == 1
