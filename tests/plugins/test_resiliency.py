"""The in-process restarter of nvidia-resiliency-ext ends saves beside training; a stand-in plays its part."""

from __future__ import annotations

import abc
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megalight.checkpoint.background.saves import Background
from megalight.errors import MissingPackageError
from megalight.plugins import package, resiliency
from tests.checkpoint import simple
from tests.checkpoint.beside import fault


class Abort(abc.ABC):
    """As the package publishes it."""

    @abc.abstractmethod
    def __call__(self, state: Any) -> Any: ...


@pytest.fixture
def restarter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess", resiliency.ABORT.partition(":")[0])
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "Abort", Abort, raising=False)
    package._load.cache_clear()
    yield
    package._load.cache_clear()


class Strategy:
    def __init__(self) -> None:
        self.background = Background()

    def abort_saves(self) -> None:
        self.background.abort()


@pytest.mark.usefixtures("restarter")
def test_a_restart_ends_the_save_under_way(tmp_path: Path) -> None:
    assert resiliency.why_not() is None
    abort, strategy, path = resiliency.abort_saves(), Strategy(), tmp_path / "a.ckpt"
    assert isinstance(abort, Abort)  # the Wrapper takes nothing else
    abort.follow(strategy)
    simple.save(path, 1)
    try:
        with fault("gate:/nonexistent"):  # it would write for ever
            simple.save(path, 2, strategy.background)
        answers: list[Any] = []
        monitor = threading.Thread(target=lambda: answers.append(abort("state")))
        monitor.start()
        monitor.join(60)
        assert answers == ["state"]
        assert strategy.background.pending is None
        assert simple.step_of(path) == 1
        # the next run of the wrapped function
        simple.save(path, 3, strategy.background)
        strategy.background.settle()
        assert simple.step_of(path) == 3
    finally:
        strategy.background.close()
    del strategy
    gc.collect()
    assert abort("state") == "state"
    assert not list(abort._followed)


def test_without_the_package_it_says_so() -> None:
    assert "nvidia_resiliency_ext" in str(resiliency.why_not())
    with pytest.raises(MissingPackageError, match="pip install nvidia-resiliency-ext"):
        resiliency.abort_saves()
