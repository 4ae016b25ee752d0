"""Folders in memory, where there is such a place: these tests write thousands of files and wait for each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.faults import Faults


def _folder() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder for one test."""
    yield from _folder()


@pytest.fixture(scope="module")
def module_path() -> Iterator[Path]:
    """A folder for the tests of one file."""
    yield from _folder()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Interference with the file system."""
    return Faults(monkeypatch)
