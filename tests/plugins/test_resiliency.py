"""The in-process restarter of nvidia-resiliency-ext ends saves beside training; a stand-in plays its part."""

from __future__ import annotations

import abc
import gc
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megalight.checkpoint.async_save.saves import AsyncSaver
from megalight.errors import MissingPackageError
from megalight.plugins import package, resiliency
from tests.checkpoint import simple
from tests.checkpoint.async_workers import fault
from tests.support.workers import free_port


class Abort(abc.ABC):
    """As the package publishes it."""

    @abc.abstractmethod
    def __call__(self, state: Any) -> Any: ...


MODULES = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess", resiliency.ABORT.partition(":")[0])


@pytest.fixture
def restarter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[MODULES[-1]], "Abort", Abort, raising=False)
    package._load.cache_clear()
    yield
    package._load.cache_clear()


class Strategy:
    def __init__(self) -> None:
        self.saver = AsyncSaver()

    def abort_saves(self) -> None:
        self.saver.abort()


@pytest.mark.usefixtures("restarter")
def test_a_restart_ends_the_save_under_way(tmp_path: Path) -> None:
    assert resiliency.why_not() is None
    abort, strategy, path = resiliency.abort_saves(), Strategy(), tmp_path / "a.ckpt"
    assert isinstance(abort, Abort)  # the Wrapper takes nothing else
    abort.follow(strategy)
    simple.save(path, 1)
    try:
        with fault("gate:/dev/null/never"):  # it would write for ever
            simple.save(path, 2, strategy.saver)
        answers: list[Any] = []
        monitor = threading.Thread(target=lambda: answers.append(abort("state")))
        monitor.start()
        monitor.join(60)
        assert answers == ["state"]
        assert strategy.saver.pending is None
        assert simple.step_of(path) == 1
        # the next run of the wrapped function
        simple.save(path, 3, strategy.saver)
        strategy.saver.settle()
        assert simple.step_of(path) == 3
    finally:
        strategy.saver.close()
    del strategy
    gc.collect()
    assert abort("state") == "state"
    assert not list(abort._followed)


REAL = """
import datetime, sys
from typing import Optional
import nvidia_resiliency_ext.inprocess as inprocess
from megalight.checkpoint import AsyncSaver
from megalight.plugins import resiliency
from tests.checkpoint import simple
from tests.checkpoint.async_workers import fault

assert resiliency.why_not() is None
abort, path, runs = resiliency.abort_saves(), sys.argv[1], []

class Strategy:
    def __init__(self):
        self.saver = AsyncSaver()
        runs.append(self.saver)

    def abort_saves(self):
        self.saver.abort()

def train(call: Optional[inprocess.CallWrapper] = None):
    strategy = Strategy()
    abort.follow(strategy)
    if call.iteration == 0:
        simple.save(path, 1)
        with fault("gate:/dev/null/never"):  # it would write for ever
            simple.save(path, 2, strategy.saver)
        runs.append(strategy.saver._worker.process)
        raise RuntimeError("a rank fails")
    assert runs[0].pending is None and runs[1].poll() is not None and simple.step_of(path) == 1
    simple.save(path, 3, strategy.saver)
    strategy.saver.settle()
    strategy.saver.close()
    return simple.step_of(path)

second = datetime.timedelta(seconds=1)
wrapper = inprocess.Wrapper(
    abort=inprocess.Compose(abort), store_kwargs={"host_name": "127.0.0.1", "port": int(sys.argv[2])},
    monitor_process_interval=second, monitor_thread_interval=second,
)
print("saved step", wrapper(train)())
"""


def test_the_wrapper_itself_restarts_after_an_abort(tmp_path: Path) -> None:
    try:
        importlib.import_module("nvidia_resiliency_ext.inprocess")
    except ImportError as error:
        pytest.skip(f"pip install nvidia-resiliency-ext ({error})")
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    one |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, "-c", REAL, str(tmp_path / "a.ckpt"), str(free_port())]
    done = subprocess.run(words, env={**os.environ, **one}, capture_output=True, text=True, timeout=200, check=False)
    assert "saved step 3" in done.stdout, done.stderr


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    package._load.cache_clear()
    assert "nvidia_resiliency_ext" in str(resiliency.why_not())
    with pytest.raises(MissingPackageError, match="pip install nvidia-resiliency-ext"):
        resiliency.abort_saves()
