import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import conftest
from tests.summary import Summary, commit


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


def report(name: str, when: str, outcome: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(name, (name, 0, name), {}, outcome, None, when, duration=duration)  # type: ignore[arg-type]


def test_summary_counts_each_test_once(tmp_path: Path) -> None:
    summary = Summary(tmp_path / "results" / "full.md")
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
                summary.pytest_runtest_logreport(report(name, when, outcome, 1.5))
    summary.pytest_sessionfinish(1)
    text = (tmp_path / "results" / "full.md").read_text()
    assert "- Result: exit status 1; 1 passed, 4 failed, 1 skipped\n" in text
    assert "| tests/a.py::good | 4.5 |" in text
    assert f"- Commit: {commit()}" in text
    assert "torch 2." in text
    assert text.endswith(
        "## Failed\n\n- tests/a.py::bad\n- tests/a.py::unset\n- tests/a.py::untorn\n- tests/a.py::both\n"
    )


def test_summary_of_a_good_run(tmp_path: Path) -> None:
    summary = Summary(tmp_path / "full.md")
    summary.pytest_runtest_logreport(report("tests/a.py::good", "call", "passed", 0.1))
    summary.pytest_sessionfinish(0)
    text = (tmp_path / "full.md").read_text()
    assert "- Result: passed; 1 passed, 0 failed, 0 skipped\n" in text
    assert "- Tests: all\n" in text
    assert "Remark" not in text
    other = Summary(tmp_path / "gpu.md", "gpu", "One file was left out.").render(0)
    assert "- Tests: those marked 'gpu'\n" in other
    assert "s\n- Remark: One file was left out.\n\n| slowest" in other


def test_a_copy_of_the_files_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert commit() == "unknown"
    monkeypatch.setenv("GIT_COMMIT", "0123abcd")
    assert commit() == "0123abcd"


@pytest.mark.parametrize(("process", "writers"), [({}, 1), ({"workerinput": {}}, 0)])
def test_one_process_of_several_writes_the_summary(process: dict[str, Any], writers: int, tmp_path: Path) -> None:
    plugins = pytest.PytestPluginManager()
    options = {"--summary": tmp_path / "full.md", "markexpr": "", "--remark": ""}
    conftest.pytest_configure(SimpleNamespace(getoption=options.get, pluginmanager=plugins, **process))  # type: ignore[arg-type]
    assert sum(isinstance(plugin, Summary) for plugin in plugins.get_plugins()) == writers
