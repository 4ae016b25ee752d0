"""Several steps on the same answers, with probabilities of when they were drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from megalight.errors import ConfigurationError
from megalight.models.gpt import GPTConfig
from megalight.optim import AdamConfig
from megalight.rl.data import PromptDataModule
from megalight.rl.module import GRPOModule
from megalight.rl.rollouts import Rollouts
from megalight.strategies import MegatronStrategy
from tests.data.chat.conftest import chat_tokenizer as chat_tokenizer
from tests.rl.test_data import write
from tests.support.environment import trainer
from tests.support.workers import run

SMALL = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=512, max_sequence_length=64)


def length(answer: Any, row: Any) -> float:
    return sum(token % 2 for token in answer.tokens) / len(answer.tokens)


class Drawing(GRPOModule):
    def __init__(self) -> None:
        rollouts = Rollouts(group_size=4, max_new_tokens=6)
        super().__init__(SMALL, AdamConfig(lr=0.05, weight_decay=0.0), rollouts=rollouts)
        self.drawn: list[tuple[int, str, list[int]]] = []
        self.figures: list[dict[str, float]] = []

    def on_answers(self, prompts: Any, groups: Any) -> None:
        stage = "train" if self.trainer.training else "validate"
        self.drawn.append((self.global_step, stage, [group[0].task.number for group in groups]))

    def on_train_batch_end(self, *args: Any) -> None:
        self.figures.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def data(tokenizer: str, path: str, **options: Any) -> PromptDataModule:
    given = {"rewards": {"odd": length}, "global_batch_size": 2, "split": "80,20,0", "val_samples": 2}
    return PromptDataModule(**{"tokenizer": tokenizer, "data": path, "steps_per_batch": 3, **given, **options})


def fit(tokenizer: str, path: str, **options: Any) -> Drawing:
    module = Drawing()
    given: dict[str, Any] = {"max_steps": 6, "precision": "32-true", "val_check_interval": 2, **options}
    trainer(MegatronStrategy(), check_val_every_n_epoch=None, **given).fit(module, data(tokenizer, path))
    return module


def drawn(tokenizer: str, path: str) -> tuple[Any, Any]:
    module = fit(tokenizer, path)
    return module.drawn, module.figures


def test_answers_are_drawn_once_and_trained_on_again(chat_tokenizer: Path, tmp_path: Path) -> None:
    size = 2 // 2
    found = run(drawn, 2, str(chat_tokenizer), write(tmp_path / "rows.jsonl", 20))
    for answers, figures in found:
        trained = [(step, numbers) for step, stage, numbers in answers if stage == "train"]
        assert [step for step, _ in trained] == [0, 3]
        assert all(len(numbers) == size for _, numbers in trained)
        # Validation between two steps on the same answers leaves these alone.
        assert [step for step, stage, _ in answers if stage == "validate"] == [2, 4, 6]
        rewards = [step["train_reward"] for step in figures]
        assert rewards[0] == rewards[1] == rewards[2] != rewards[3] == rewards[4] == rewards[5]
        # The policy moves away from the one that drew, and comes back to it with each draw.
        drifts = [step["train_drift"] for step in figures]
        assert drifts[0] < 1e-6 < drifts[1] < drifts[2] > drifts[3]
        clipped = [step["train_clipped"] for step in figures]
        assert clipped[0] == clipped[3] == 0 < clipped[2]
    assert [numbers for _, stage, numbers in found[0][0] if stage == "train"] == [[0], [2]]
    assert [numbers for _, stage, numbers in found[1][0] if stage == "train"] == [[1], [3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": -1, "max_epochs": 1}, "needs the length of the run in steps"),
        ({"accumulate_grad_batches": 2}, "would add up the same answers"),
    ],
)
def test_runs_in_which_answers_cannot_be_used_again_are_refused(
    chat_tokenizer: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 6,
        **dict.fromkeys(quiet, False),
        **options,
    }
    how = pl.Trainer(**given)
    with pytest.raises(ConfigurationError, match=message):
        how.fit(Drawing(), data(str(chat_tokenizer), write(tmp_path / "rows.jsonl", 20)))
    with pytest.raises(ConfigurationError, match="steps_per_batch is 0"):
        data(str(chat_tokenizer), write(tmp_path / "rows.jsonl", 20), steps_per_batch=0)
