"""A model and tasks that tests of this folder evaluate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.samples import save_model, save_tasks


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("evaluation")
    return save_model(folder / "model"), save_tasks(folder / "tasks")
