"""Answers are written as they are drawn, by one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from megalight.errors import ConfigurationError
from megalight.rl.answer_log import AnswerLog
from megalight.strategies import MegatronStrategy
from tests.environment import trainer
from tests.rl.helpers import PROMPTS, ROLLOUTS, Policy
from tests.workers import run


def logged(root: str) -> list[Any]:
    module = Policy(4)
    how = trainer(
        MegatronStrategy(tensor_parallel=2),
        root,
        max_steps=4,
        use_distributed_sampler=False,
        callbacks=[AnswerLog(every_n_steps=2)],
        limit_val_batches=1,
        check_val_every_n_epoch=None,
        val_check_interval=4,
    )
    how.fit(module)
    return module.seen


def test_answers_are_written_with_their_rewards(tmp_path: Path) -> None:
    seen = run(logged, 2, str(tmp_path))[0]
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    size = ROLLOUTS.group_size
    assert [(row["step"], row["stage"]) for row in rows] == [
        *[(0, "train")] * size,
        *[(2, "train")] * size,
        (4, "validate"),
    ]
    texts = [" ".join(map(str, tokens)) for tokens in seen[0][0] + seen[2][0] + seen[4][0]]
    assert [row["answer"] for row in rows] == texts
    assert rows[0]["prompt"] == " ".join(map(str, PROMPTS[0]))
    for row in rows:
        assert row["reward"] == pytest.approx(row["rewards"]["large"] + 0.1 * row["rewards"]["short"])
        assert row["reason"] in ("end", "length")


def test_numbers_below_1_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="every_n_steps is 0"):
        AnswerLog(every_n_steps=0)
    with pytest.raises(ConfigurationError, match="prompts is 0"):
        AnswerLog(prompts=0)


def test_all_prompts_can_be_written(tmp_path: Path) -> None:
    how = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[AnswerLog(prompts=None, filename="all.jsonl")],
    )
    how.fit(Policy(1))
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 4 * ROLLOUTS.group_size
