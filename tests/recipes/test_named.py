"""One recipe of each job trains two steps: its name, and what makes it tiny."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megalight import checkpoint
from megalight.cli.main import main
from tests.evaluation.samples import save_model
from tests.recipes.test_layouts import megalight

TINY = [
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=0",
    "--trainer.log_every_n_steps=1",
    "--trainer.strategy.micro_batch_size=1",
    "--data.global_batch_size=4",
    "--data.sequence_length=32",
]
CONFIG = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 2,
    "ffn_hidden_size": 32,
    "vocab_size": 280,
    "max_sequence_length": 32,
}


def losses(folder: Path) -> list[float]:
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        return [float(row["train_loss"]) for row in csv.DictReader(lines) if row.get("train_loss")]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param("pretrain-1xGPU", marks=pytest.mark.full),
        pytest.param("pretrain-fsdp-4xGPU", marks=pytest.mark.full),
        "pretrain-pp-4xGPU",
    ],
)
def test_pre_training(job: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    made = ["-o", str(tmp_path / "text"), "--train-tokenizer", "--vocab-size=280", "--workers=1", "-q"]
    assert main(["prepare", str(tmp_path / "text.txt"), *made]) == 0
    devices = 1 if job.endswith("1xGPU") else 2
    words = [*TINY, f"--model.config={json.dumps(CONFIG)}", f"--trainer.devices={devices}", "--data.data=text"]
    megalight(tmp_path, "fit", "-c", f"gpt2_small-{job}", *words)
    assert len(losses(tmp_path / "runs" / f"gpt2_small-{job}")) == 2


@pytest.mark.parametrize(
    ("job", "devices"), [("sft-4xGPU", 2), pytest.param("lora-1xGPU", 1, marks=pytest.mark.full), ("qlora-1xGPU", 1)]
)
def test_fine_tuning(job: str, devices: int, tmp_path: Path) -> None:
    save_model(tmp_path / "model", width=64, double=False)
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "the moon"}]}
        for word in ("cat", "dogs", "hills", "ball") * 10
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = ["--tokenizer", str(tmp_path / "model"), "-o", str(tmp_path / "chat"), "--workers=1", "-q"]
    assert main(["prepare", "--chat", str(tmp_path / "chat.jsonl"), *made]) == 0
    words = [*TINY, f"--trainer.devices={devices}", "--data.data=chat", "--model.weights=model"]
    megalight(tmp_path, "fit", "-c", f"gpt2_small-{job}", *words)
    run = tmp_path / "runs" / f"gpt2_small-{job}"
    assert len(losses(run)) == 2
    names = list(checkpoint.open(checkpoint_of(run)).tensors)
    assert names
    assert all(".lora_" in name for name in names) is ("lora" in job)


def checkpoint_of(run: Path) -> Path:
    (found,) = run.rglob("last.ckpt")
    return found
