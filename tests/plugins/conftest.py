"""Stand-ins of packages on a device that is taken for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins import fakes
from tests.plugins.fakes import Fakes


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes.pretend_cuda(monkeypatch)
    return Fakes(tmp_path, monkeypatch)
