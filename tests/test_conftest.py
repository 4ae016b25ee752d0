import os
import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests import conftest
from tests.support import summary
from tests.support.programs import forked
from tests.support.summary import Summary, commit
from tests.support.workers import run


def unanswered() -> str:
    with pytest.raises(socket.gaierror) as told:
        socket.getaddrinfo("nobody.invalid", 80)
    return {socket.EAI_AGAIN: "not asked", socket.EAI_NONAME: "unknown"}[told.value.errno]


def test_no_name_server_is_asked() -> None:
    assert [unanswered(), *run(unanswered, 2)] == ["not asked"] * 3


@pytest.fixture(scope="module")
def _left_by_a_run() -> None:
    os.environ["LOCAL_RANK"] = "1"


@pytest.mark.usefixtures("_left_by_a_run")
def test_a_test_is_no_rank_of_an_earlier_run() -> None:
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.usefixtures("poison")
def test_poisoned_memory_holds_nan() -> None:
    assert torch.empty(5).isnan().all()
    assert torch.empty_like(torch.ones(2, 3)).isnan().all()
    assert torch.empty(3, dtype=torch.int64).eq(torch.iinfo(torch.int64).max).all()


def test_the_poison_is_gone_afterwards() -> None:
    assert not torch.are_deterministic_algorithms_enabled()


FIRST: dict[str, float] = {}


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_starts_from_the_same_random_state(turn: int) -> None:
    for name, value in (("py", random.random()), ("np", np.random.rand()), ("torch", torch.rand(()).item())):
        assert FIRST.setdefault(name, value) == value


def test_examples_of_properties_differ_in_whole_runs_alone(pytestconfig: pytest.Config) -> None:
    assert settings.default.derandomize == bool(pytestconfig.getoption("markexpr"))


def report(name: str, when: str, outcome: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(name, (name, 0, name), {}, outcome, None, when, duration=duration)  # type: ignore[arg-type]


def test_summary_counts_each_test_once(tmp_path: Path) -> None:
    run = Summary(tmp_path / "results" / "full.md")
    for name, outcomes in {
        "tests/a.py::good": ("passed", "passed", "passed"),
        "tests/a.py::bad": ("passed", "failed", "passed"),
        "tests/a.py::unset": ("failed", None, "passed"),
        "tests/a.py::untorn": ("passed", "passed", "failed"),
        "tests/a.py::both": ("passed", "failed", "failed"),
        "tests/a.py::left_out": ("skipped", None, "passed"),
    }.items():
        for when, outcome in zip(("setup", "call", "teardown"), outcomes, strict=True):
            if outcome:
                run.pytest_runtest_logreport(report(name, when, outcome, 1.5))
    run.pytest_sessionfinish(1)
    text = (tmp_path / "results" / "full.md").read_text()
    assert "- Result: exit status 1; 1 passed, 4 failed, 1 skipped\n" in text
    assert "| tests/a.py::good | 4.5 |" in text
    assert f"- Commit: {commit()}" in text
    assert "torch 2." in text
    assert text.endswith(
        "## Failed\n\n- tests/a.py::bad\n- tests/a.py::unset\n- tests/a.py::untorn\n- tests/a.py::both\n"
    )


def test_summary_of_a_good_run(tmp_path: Path) -> None:
    run = Summary(tmp_path / "full.md")
    run.pytest_runtest_logreport(report("tests/a.py::good", "call", "passed", 0.1))
    run.pytest_sessionfinish(0)
    text = (tmp_path / "full.md").read_text()
    assert "- Result: passed; 1 passed, 0 failed, 0 skipped\n" in text
    assert "- Tests: all\n" in text
    assert "Remark" not in text
    other = Summary(tmp_path / "gpu.md", "gpu", "One file was left out.").render(0)
    assert "- Tests: those marked 'gpu'\n" in other
    assert "s\n- Remark: One file was left out.\n\n| slowest" in other


TESTS = """
import os, pathlib, signal, time
def test_first(): pass
def test_second(): assert False
def test_third():
    while "1 failed" not in pathlib.Path(__file__).with_name("page.md").read_text():
        time.sleep(0.01)  # the process that writes may hear of the second test after this one has begun
    os.kill(os.getppid() if PARENT else os.getpid(), signal.SIGKILL)
def test_fourth(): pass
"""


def ended_run(folder: str, processes: tuple[str, ...]) -> None:
    with patch.object(summary, "INTERVAL", 0.0):
        pytest.main([folder, *processes, "-q", "-p", "no:cacheprovider"], plugins=[Summary(Path(folder, "page.md"))])


@pytest.mark.parametrize("processes", [(), ("--numprocesses=1",)])
def test_a_run_that_is_ended_leaves_what_it_found(processes: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS.replace("PARENT", str(bool(processes))))
    status = forked(ended_run, str(tmp_path), processes, output=tmp_path / "output")
    assert status != 0
    page = (tmp_path / "page.md").read_text()
    assert "- Result: ended before 2 of 4 tests; 1 passed, 1 failed, 0 skipped\n" in page, page
    assert page.endswith("## Failed\n\n- test_it.py::test_second\n")


def test_a_run_that_has_begun_replaces_the_page_of_an_earlier_one(tmp_path: Path) -> None:
    page = tmp_path / "full.md"
    page.write_text("all passed")
    run = Summary(page)
    run.pytest_xdist_node_collection_finished(["a", "b"])
    assert "- Result: ended before 2 of 2 tests; 0 passed" in page.read_text()
    run.pytest_runtest_logreport(report("a", "call", "passed", 0.1))
    assert "ended before 2" in page.read_text(), "it is not written after each of thousands of tests"
    run.pytest_sessionfinish(2)
    assert "- Result: exit status 2 before 1 of 2 tests; 1 passed" in page.read_text()


def test_a_copy_of_the_files_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert commit() == "unknown"
    monkeypatch.setenv("GIT_COMMIT", "0123abcd")
    assert commit() == "0123abcd"


@pytest.mark.parametrize(("process", "writers"), [({}, 1), ({"workerinput": {}}, 0)])
def test_one_process_of_several_writes_the_summary(
    process: dict[str, Any], writers: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    plugins = pytest.PytestPluginManager()
    options = {"--summary": tmp_path / "full.md", "markexpr": pytestconfig.getoption("markexpr"), "--remark": ""}
    conftest.pytest_configure(SimpleNamespace(getoption=options.get, pluginmanager=plugins, **process))  # type: ignore[arg-type]
    assert sum(isinstance(plugin, Summary) for plugin in plugins.get_plugins()) == writers
