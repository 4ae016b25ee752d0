"""Setup of all tests: no name server, seeds, skipped GPU tests, Hypothesis without limits, poison, a summary."""

from __future__ import annotations

import fcntl
import gc
import importlib
import logging
import os
import random
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.summary import Summary

HERE = Path(__file__).parent
# No test depends on speed: on a busy machine an example may take any time. `pytest-timeout` ends tests that hang.
settings.register_profile("searching", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("repeated", settings.get_profile("searching"), derandomize=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", metavar="PATH", type=Path, help="write date, versions, counts and duration to PATH")
    parser.addoption("--remark", metavar="TEXT", default="", help="with --summary: a sentence to write there, too")


def pytest_configure(config: pytest.Config) -> None:
    # What every change must pass has the same examples each time. Whole runs search for others.
    settings.load_profile("repeated" if config.getoption("markexpr") else "searching")
    # Matrices in tests are small, and ranks share the cores: with two threads, some operations take 20 times as long.
    # Lightning sets the number of threads unless it finds the variable.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # No name server. torch asks for the name of the other end of each connection of a store, which is this machine; if
    # one answer in fifty is lost, every tenth job of ranks waits for five seconds.
    os.environ["RES_OPTIONS"] = "attempts:0"
    # Names of the Hugging Face Hub are read from its stand-in alone (tests/support/hub.py).
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns that there was no answer
    if not torch.cuda.is_available():
        importlib.import_module("tests.support.seeds")
    # Of each tensor that is read alone, torch's checkpoints write debug records, which pytest would keep.
    logging.disable(logging.DEBUG)
    # Collecting tests makes a million objects and no garbage. Looking for some takes a quarter of the time.
    gc.disable()
    # Of several processes of tests, the first one hears of all results.
    if (path := config.getoption("--summary")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(path, config.getoption("markexpr"), config.getoption("--remark")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files of GPU tests alone where these are not asked for: a tenth of the time of collecting."""
    return (collection_path.name.endswith("_gpu.py") and "not gpu" in config.getoption("markexpr")) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep tests that share ranks over NCCL in one process, under ``--dist loadgroup``."""
    module = item.getparent(pytest.Module)
    if module is not None and hasattr(module.obj, "runs_of"):
        item.add_marker(pytest.mark.xdist_group(module.name))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import the files of a whole run from another place on in each of several processes.

    In a fresh clone each file must be compiled, with assertions that tell values: twelve seconds. From different
    places, each process compiles its part, and finds what the others have compiled after that.
    """
    config = session.config
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS and hasattr(config, "workerinput"):
        files = sorted(file for file in HERE.rglob("test_*.py") if not pytest_ignore_collect(file, config))
        number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
        start = len(files) * number // count
        for file in [*files[start:], *files[:start]]:
            with suppress(Exception, pytest.skip.Exception):  # collecting the file will tell
                importlib.import_module(".".join(file.relative_to(HERE.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Let Lightning search for installed callbacks only once, if a test has imported it; let garbage be collected."""
    if "lightning.pytorch" in sys.modules:
        importlib.import_module("tests.support.installed")
    # What is there now stays. Each full collection would look at all of it, for half a second.
    gc.enable()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test marked ``gpu(alone=True)`` have the GPUs without tests of other processes.

    It takes all free memory, or asks how much is free.
    """
    mark = item.get_closest_marker("gpu")
    if mark is None or not torch.cuda.is_available():
        return (yield)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    name = Path(tempfile.gettempdir(), f"megalight-tests-{os.getuid()}-{visible}")
    with open(f"{name}.next", "w") as door, open(f"{name}.gpu", "w") as room:
        # Who waits for the GPUs alone lets nobody pass.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if mark.kwargs.get("alone") else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Fork the server of ranks from here, if a test needs it; outside of what pytest does with warnings and logs."""
    # A fork of a process that has asked for GPUs cannot use them. There, it is an interpreter of its own.
    if (
        "tests.support.workers" in sys.modules
        and not session.config.option.collectonly
        and not torch.cuda.device_count()
    ):
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # ranks print to where tests do
        # Once for both; many tests need them here too.
        for name in importlib.import_module("tests.support.workers").PRELOAD:
            importlib.import_module(name)
        if "tests.support.programs" in sys.modules:
            importlib.import_module("tests.support.read_once")
        importlib.import_module("tests.support.forks").start()
        capture.suspend_global_capture(in_=True)
    return (yield)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Start every test from the same random state, and as no rank of a run, independent of earlier tests."""
    # Commands and Trainers of earlier tests in this process may have set them.
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _device_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give unused device memory back after each GPU test, because other processes of tests share the device."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill new memory (``torch.empty`` and similar) with NaN, so that a read before the first write gives NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill
