"""The recipe of GRPO: a small chat model draws answers to puzzles, learns from them and writes them down."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from megalight import checkpoint
from megalight.data.tokenizer import Tokenizer
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.rl.countdown import TEXT
from tests.recipes.test_layouts import RECIPES, megalight

CONFIG = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=300, max_sequence_length=256)
WORDS = [
    "--model.init_args.weights=start.ckpt",
    "--data.init_args.tokenizer=tokenizer",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--trainer.callbacks.init_args.every_n_train_steps=2",
    "--model.init_args.rollouts.group_size=2",
    "--model.init_args.rollouts.max_new_tokens=8",
    "--data.init_args.global_batch_size=2",
    "--data.init_args.data.init_args.count=200",
]


def test_the_recipe_of_grpo(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train([TEXT] * 40, 300)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save(tmp_path / "tokenizer")
    model = GPT(CONFIG)
    initialize(model, 1, "model.")
    save_model(held_model("gpt", CONFIG, model), tmp_path / "start.ckpt")
    megalight(tmp_path, "fit", "-c", str(RECIPES / "grpo.yaml"), *WORDS)
    (file,) = (tmp_path / "runs" / "grpo").rglob("metrics.csv")
    with file.open() as lines:
        columns = set(next(csv.reader(lines)))
    assert {"train_reward_solved", "train_entropy", "train_truncated", "val_reward"} <= columns
    (answers,) = (tmp_path / "runs" / "grpo").rglob("answers.jsonl")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert rows[0]["prompt"].startswith("user: Write an equation that equals")
    assert [(row["step"], row["stage"]) for row in rows] == [(0, "train"), (0, "train"), (2, "validate")]
    saved = checkpoint.open(tmp_path / "runs" / "grpo" / "checkpoints" / "last.ckpt")
    assert "model.embed.word.weight" in saved.tensors
