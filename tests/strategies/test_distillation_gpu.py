"""Distillation of logits and hidden states on one GPU: as by torch alone, and without a step that waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalight.callbacks import Distillation
from megalight.models.gpt.module import GPTModule
from megalight.models.stored import held_model, save_model
from megalight.strategies import MegatronStrategy
from tests.strategies.test_distillation import STEPS, STUDENT, Student, teacher_of
from tests.strategies.test_distillation_pairs import BALANCED, by_hand
from tests.strategies.test_gpu import batches, watched
from tests.strategies.training import ADAM, SEED

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "untied"
    model = teacher_of("untied")
    save_model(held_model("gpt", model.config, model), folder)
    return folder


def fit(module: GPTModule, teacher: Path, precision: Any, steps: int, strict: bool, data: Any = None) -> list[float]:
    options = {"strategy": MegatronStrategy(micro_batch_size=1), "precision": precision, "max_steps": steps}
    return watched(module, data, strict, callbacks=[Distillation(teacher, **BALANCED)], **options)


def test_losses_are_those_of_torch_alone(teacher: Path) -> None:
    wanted = [row[0] for row in by_hand(teacher.name, False, **BALANCED, device="cuda")[0]]
    np.testing.assert_allclose(fit(Student(), teacher, "64-true", STEPS, strict=False), wanted, rtol=1e-9)


def test_no_step_waits_for_the_device(teacher: Path) -> None:
    data = batches(12)
    losses = fit(GPTModule(STUDENT, optimizer=ADAM, seed=SEED), teacher, "bf16-mixed", 12, strict=True, data=data)
    assert len(losses) == 12
    assert np.isfinite(losses).all()
