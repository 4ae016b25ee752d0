"""A file with answers that a policy gives while it learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from megalight.callbacks.run_record import log_folder
from megalight.errors import integer
from megalight.rl.environment import PromptBatch
from megalight.rl.rollouts import Trajectory


class AnswerLog(pl.Callback):
    """Writes answers to ``answers.jsonl`` in the log folder, a line each, as they are sampled.

    A line has the ``step`` and ``stage`` (``train``, ``validate``), ``prompt``, ``answer``, ``reason`` (why it ended),
    ``reward`` and ``rewards``, each one's value before its weight. The answers are those of the first replica. With
    ``fast_dev_run`` nothing is written. A resumed run that writes to the same file first drops the lines of steps that
    come again.

    Args:
        every_n_steps: steps from one to the next that is written. Validation is always written.
        prompts: how many prompts of a batch are written, with all their answers. None: all.
        filename: name of the file in the log folder.

    Raises:
        ConfigurationError: a number is no integer of at least 1.
    """

    def __init__(self, every_n_steps: int = 10, prompts: int | None = 1, filename: str = "answers.jsonl") -> None:
        self.every_n_steps = integer("every_n_steps", every_n_steps)
        self.prompts = None if prompts is None else integer("prompts", prompts)
        self.filename = filename
        self._path: Path | None = None
        self._resumed_at = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the log folder."""
        folder = log_folder(trainer)  # a broadcast inside: every rank must call it
        self._path = None if folder is None or trainer.fast_dev_run else Path(folder) / self.filename  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the lines of steps after the one from which the run resumes."""
        self._resumed_at = trainer.global_step
        if trainer.global_step and trainer.is_global_zero:
            self._drop_from(trainer.global_step, "train")

    def on_answers(
        self, trainer: pl.Trainer, module: pl.LightningModule, prompts: PromptBatch, groups: Sequence[list[Trajectory]]
    ) -> None:
        """Write answers on rank 0."""
        due = not trainer.training or trainer.global_step % self.every_n_steps == 0
        if self._path is None or not due or not trainer.is_global_zero:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        stage = "train" if trainer.training else "validate"
        if stage == "validate" and trainer.global_step == self._resumed_at > 0:
            # The checkpoint was saved before its validation, which comes again.
            self._drop_from(trainer.global_step, stage)
            self._resumed_at = 0
        lines = [
            self._line(prompts, answer, {"step": trainer.global_step, "stage": stage})
            for group in groups[: self.prompts]
            for answer in group
        ]
        # Appended as a whole: others may follow the file.
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def _drop_from(self, step: int, stage: str) -> None:
        """Cut off the end of the file: lines of later steps than ``step``, and of ``stage`` in ``step``."""
        if self._path is None or not self._path.exists():
            return
        at = kept = 0
        with self._path.open("r+b") as file:
            for line in file:
                at += len(line)
                if not _comes_again(line, step, stage):
                    kept = at
            file.truncate(kept)

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


def _comes_again(line: bytes, step: int, stage: str) -> bool:
    try:
        row = json.loads(line)
        return bool(row["step"] > step or (row["step"], row["stage"]) == (step, stage))
    except (ValueError, TypeError, KeyError):
        return not line.endswith(b"\n")  # half a line, of a run that was killed
