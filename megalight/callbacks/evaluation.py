"""Tasks of ``lm-eval`` in training: the model is scored every ``n`` steps, in the layout in which it trains."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, integer
from megalight.evaluation import Replicas
from megalight.imports import require
from megalight.inference import TextGenerator
from megalight.parallel.trace import span
from megalight.strategies.inference import InferenceModel, model_of


class Evaluation(pl.Callback):
    """Scores the model on tasks of ``lm-eval`` every ``every_n_steps`` optimizer steps.

    The model computes where it lies: nothing is gathered or saved first, and data-parallel ranks share the questions.
    Random numbers of the training do not change.

    Args:
        tasks: names of tasks and groups; see :class:`~megalight.evaluation.lm.EvaluationOptions`.
        every_n_steps: optimizer steps between evaluations.
        num_fewshot: examples before each question; None: as each task says.
        limit: questions of each task; below 1, a part of them. None: all.
        include_path: a folder with tasks of your own.
        apply_chat_template: ask as a user of the chat model.
        gen_kwargs: options of generation, which win over those of the tasks.
        tokenizer: a ``tokenizer.json`` or its folder. None: that of the data module.
        batch_tokens: tokens of a forward pass.
        max_sequences: answers that are generated at a time, on each replica.
        whole_weights: with full sharding, gather all weights once, and not in every forward pass.

    Logs:
        eval/<task>/<metric>: the score, such as ``eval/hellaswag/acc_norm``; those of groups too.

    Raises:
        ConfigurationError: a value is out of range. Before training: there is no such task, or no tokenizer.
        MissingPackageError: before training, if ``lm-eval`` is not installed.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        every_n_steps: int,
        *,
        num_fewshot: int | None = None,
        limit: float | None = None,
        include_path: str | os.PathLike[str] | None = None,
        apply_chat_template: bool = False,
        gen_kwargs: Mapping[str, Any] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        batch_tokens: int = 4096,
        max_sequences: int = 64,
        whole_weights: bool = False,
    ) -> None:
        self.every_n_steps = integer("every_n_steps", every_n_steps)
        self._options = {
            "tasks": tasks,
            "num_fewshot": num_fewshot,
            "limit": limit,
            "include_path": include_path,
            "apply_chat_template": apply_chat_template,
            "gen_kwargs": gen_kwargs,
        }
        self._tokenizer_path = tokenizer
        self._sizes = {"batch_tokens": batch_tokens, "max_sequences": max_sequences}
        self._whole_weights = whole_weights
        self._tokenizer: Tokenizer | None = None
        self._last_step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find mistakes before the first step."""
        if stage != "fit":
            return
        require("lm_eval", "the callback Evaluation")
        runs = importlib.import_module("megalight.evaluation.lm")
        options = runs.EvaluationOptions(**self._options)
        runs.Tasks.having(options.tasks, options.include_path).names(options.tasks)
        if self._tokenizer_path is not None:
            self._tokenizer = Tokenizer.load(self._tokenizer_path)
        else:
            self._tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        if not isinstance(self._tokenizer, Tokenizer):
            raise ConfigurationError("the data has no tokenizer, which Evaluation needs; give one with tokenizer=PATH.")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember where training starts, so that a resumed run does not evaluate twice."""
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate, if a step has ended and its number is a multiple of ``every_n_steps``."""
        step = trainer.global_step
        # With accumulation, several batches end at the same step.
        if step == self._last_step or step % self.every_n_steps:
            return
        self._last_step = step
        for name, score in self._scores(trainer, pl_module).items():
            # All ranks have the same scores.
            pl_module.log(f"eval/{name}", score, batch_size=1, rank_zero_only=False)

    def _scores(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, float]:
        runs = importlib.import_module("megalight.evaluation.lm")
        lm = importlib.import_module("megalight.evaluation.lm")
        assert self._tokenizer is not None
        found = InferenceModel(model_of(pl_module), trainer.strategy)
        text = TextGenerator(found.model, self._tokenizer)
        replicas = Replicas.of(found.model)
        with span("evaluation"), found.with_weights(self._whole_weights):
            answering = lm.MegalightLM(text, replicas=replicas, **self._sizes)
            results = runs.evaluate(answering, runs.EvaluationOptions(**self._options, bootstrap_iters=0))
        scores: dict[str, float] = runs.scores(results)
        return scores
