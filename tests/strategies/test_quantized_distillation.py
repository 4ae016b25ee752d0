"""Quantization-aware distillation: a rounded student beside its teacher, as ModelOpt and torch alone compute it."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.callbacks import Distillation, ModelOptQuantization
from megalight.models.gpt import GPT
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.plugins.modelopt.layers import register_layers
from megalight.plugins.modelopt.presets import modelopt
from megalight.strategies import MegatronStrategy
from megalight.types import TokenBatch
from tests.strategies.test_distillation import (
    LR,
    PIPELINE,
    SHARES,
    STEPS,
    STUDENT,
    TEACHERS,
    Student,
    batches_of,
    divergence_of,
    teacher_of,
)
from tests.strategies.training import SEED
from tests.support.environment import trainer
from tests.support.workers import run

pytest.importorskip("modelopt")
CALIBRATION = 2
SCALE = 0.7


@functools.cache
def by_hand() -> list[tuple[float, float, float]]:
    """Objectives, divergences and own losses of a student in ModelOpt's hands."""
    register_layers()
    mtq, student, guide = modelopt(), GPT(STUDENT).double(), teacher_of("untied")
    initialize(student, SEED, "model.")
    batches = batches_of(False)

    def loop(root: nn.Module) -> None:
        with torch.no_grad():
            for batch in batches[:CALIBRATION]:
                root(batch.tokens.flatten(), batch.sequences)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mtq.quantize(student, copy.deepcopy(mtq.FP8_DEFAULT_CFG), loop)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR)

    def losses_of(batch: TokenBatch) -> tuple[Tensor, Tensor]:
        mask = batch.loss_mask.flatten()
        logits, theirs = (model(batch.tokens.flatten(), batch.sequences).logits for model in (student, guide))
        divergences = divergence_of("forward_kl", logits, theirs.detach(), 1.0)
        own = F.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        return (divergences * mask).sum() / mask.sum(), (own * mask).sum() / mask.sum()

    rows = []
    for batch in batches:
        found, own = losses_of(batch)
        loss = SCALE * found + own
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append((float(loss.detach()), float(found.detach()), float(own.detach())))
    return rows


def learn(folder: Path, layout: dict[str, Any], quantized: bool) -> list[tuple[float, ...]]:
    module, rows = Student(), list[tuple[float, ...]]()

    def keep(*_: Any) -> None:
        names = ("train_loss", "train_divergence", "train_own_loss")
        rows.append(tuple(float(runner.callback_metrics[name]) for name in names))

    module.on_train_batch_end = keep  # type: ignore[method-assign]
    runner = trainer(
        MegatronStrategy(**layout),
        max_steps=STEPS,
        use_distributed_sampler=False,
        num_sanity_val_steps=CALIBRATION,
        callbacks=[Distillation(folder, own_loss=True, scale=SCALE), *[ModelOptQuantization()] * quantized],
    )
    runner.fit(module)
    return rows


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "untied"
    save_model(held_model("gpt", TEACHERS["untied"], teacher_of("untied")), folder)
    return folder


@pytest.mark.parametrize(("ranks", "layout"), [pytest.param(2, SHARES, marks=pytest.mark.full), (2, PIPELINE)])
def test_a_rounded_student_learns_as_by_hand(ranks: int, layout: dict[str, Any], teacher: Path) -> None:
    found = run(learn, ranks, teacher, layout, True, timeout=240)[0]
    np.testing.assert_allclose(found, by_hand(), rtol=1e-9)


def test_the_teacher_is_not_rounded_and_the_student_is(teacher: Path) -> None:
    plain, rounded = (np.array(run(learn, 1, teacher, {}, each, timeout=240)[0]) for each in (False, True))
    assert np.abs(plain / rounded - 1).min() > 1e-6
