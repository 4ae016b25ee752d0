"""What every test gets: seeds, GPU tests skipped where there is none, poisoned memory on request, a written summary."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.summary import Summary


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", metavar="PATH", type=Path, help="write date, versions, counts and duration to PATH")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # the tests' matrices are small, and pools of ranks share the cores
    if path := config.getoption("--summary"):
        config.pluginmanager.register(Summary(path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Every test starts from the same random state, whichever tests ran before it."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # left by commands that ran in this process
        os.environ.pop(name, None)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh memory of ``torch.empty`` and its kin holds NaN: what reads before it writes shows itself."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill
