"""A file with answers that a policy gives while it learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from megalight.callbacks.run_record import log_folder
from megalight.errors import ConfigurationError
from megalight.rl.environment import PromptBatch
from megalight.rl.rollouts import Trajectory


class AnswerLog(pl.Callback):
    """Writes answers to ``answers.jsonl`` in the log folder, a line each, as they are drawn.

    A line has the ``step`` and ``stage`` (``train``, ``validate``), ``prompt``, ``answer``, ``reason`` (why it ended),
    ``reward`` and ``rewards``, each one's value before its weight. The answers are those of the first replica. With
    ``fast_dev_run`` nothing is written.

    Args:
        every_n_steps: steps from one to the next that is written. Validation is always written.
        prompts: how many prompts of a batch are written, with all their answers. None: all.
        filename: name of the file in the log folder.

    Raises:
        ConfigurationError: a number is below 1.
    """

    def __init__(self, every_n_steps: int = 10, prompts: int | None = 1, filename: str = "answers.jsonl") -> None:
        for name, value in (("every_n_steps", every_n_steps), ("prompts", 1 if prompts is None else prompts)):
            if value < 1:
                raise ConfigurationError(f"AnswerLog: {name} is {value}; it must be at least 1.")
        self.every_n_steps = every_n_steps
        self.prompts = prompts
        self.filename = filename
        self._path: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the log folder."""
        folder = log_folder(trainer)  # a broadcast inside: every rank must call it
        self._path = None if folder is None or trainer.fast_dev_run else Path(folder) / self.filename  # type: ignore[attr-defined]

    def on_answers(
        self, trainer: pl.Trainer, module: pl.LightningModule, prompts: PromptBatch, groups: Sequence[list[Trajectory]]
    ) -> None:
        """Write answers on rank 0."""
        due = not trainer.training or trainer.global_step % self.every_n_steps == 0
        if self._path is None or not due or not trainer.is_global_zero:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        stage = "train" if trainer.training else "validate"
        lines = [
            self._line(prompts, answer, {"step": trainer.global_step, "stage": stage})
            for group in groups[: self.prompts]
            for answer in group
        ]
        # Appended as a whole: others may follow the file.
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def _line(self, prompts: PromptBatch, answer: Trajectory, values: dict[str, Any]) -> str:
        tokenizer, task, completion = prompts.environment.tokenizer, answer.task, answer.completion
        values |= {
            "prompt": tokenizer.decode(task.prompt),
            "answer": tokenizer.decode_after(task.prompt, completion.tokens),
            "reason": completion.reason,
            "reward": answer.score.total,
            "rewards": dict(answer.score.parts),
        }
        return json.dumps(values, ensure_ascii=False) + "\n"
