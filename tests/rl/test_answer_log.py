"""Answers are written as they are drawn, by one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.errors import ConfigurationError
from megalight.rl.answer_log import AnswerLog
from megalight.strategies import MegatronStrategy
from tests.rl.helpers import PROMPTS, ROLLOUTS, Policy
from tests.support.environment import trainer
from tests.support.workers import run


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


def kept(root: str, after_validation: bool, steps: int, resume: bool) -> None:
    """Saves each second step, before or after the validation that follows it."""
    often = {"save_on_train_epoch_end": False} if after_validation else {"every_n_train_steps": 2}
    keep = ModelCheckpoint(root, "{step}", save_top_k=-1, **often)  # type: ignore[arg-type]
    how = trainer(
        MegatronStrategy(),
        root,
        max_steps=steps,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        callbacks=[AnswerLog(every_n_steps=1), keep],
        limit_val_batches=2,
        check_val_every_n_epoch=None,
        val_check_interval=2,
    )
    how.fit(Policy(6), ckpt_path=str(Path(root) / "step=2.ckpt") if resume else None)


@pytest.mark.parametrize("after_validation", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_resumed_run_writes_no_step_twice(after_validation: bool, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        # Of an earlier run in this folder, which stays.
        (folder / "answers.jsonl").write_text('{"step": 9, "stage": "train"}\n{"step": 0, "stage": "train"}\n')
    run(kept, 1, str(whole), after_validation, 6, False)
    run(kept, 1, str(broken), after_validation, 5, False)
    with (broken / "answers.jsonl").open("a") as file:
        file.write('{"step": 5, "sta')  # killed while it wrote
    run(kept, 1, str(broken), after_validation, 6, True)
    expected = (whole / "answers.jsonl").read_text()
    assert expected.count('"step": 4, "stage": "validate"') == 2
    assert (broken / "answers.jsonl").read_text() == expected


def test_numbers_below_1_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="every_n_steps is 0"):
        AnswerLog(every_n_steps=0)
    with pytest.raises(ConfigurationError, match="prompts is 0"):
        AnswerLog(prompts=0)
    with pytest.raises(ConfigurationError, match=r"every_n_steps is 2\.5; it must be an integer, at least 1"):
        AnswerLog(every_n_steps=2.5)  # type: ignore[arg-type]


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
