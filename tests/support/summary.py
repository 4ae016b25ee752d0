"""The record of a full test run: tests, machine, versions and results."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megalight.imports import version

DISTRIBUTIONS = (
    *("megalight", "torch", "lightning", "jsonargparse", "transformers", "numpy", "safetensors", "triton"),
    *("transformer-engine", "apex", "flash-attn"),
)
SLOWEST = 10
INTERVAL = 2.0
"""Seconds between two writings of the page while tests run."""


def commit() -> str:
    """Return the commit under test, with a mark if the working tree differs from it.

    The environment variable ``GIT_COMMIT`` overrides it: a copy of the files may have an older repository, or none.
    """
    if known := os.environ.get("GIT_COMMIT"):
        return known
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    if shutil.which("git") is None:
        return "unknown"
    answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return answer.stdout.strip() or "unknown"


def device() -> str:
    """Describe the machine in a few words."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    shown = f"{len(gpus)} x {gpus[0]} (CUDA {torch.version.cuda})" if gpus else "no GPU"
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, {shown}"


class Summary:
    """A pytest plugin that writes a markdown page while tests run, so that a run which is ended leaves one, too.

    Args:
        path: the page.
        selection: the expression of marks (pytest's ``-m``) that chose the tests.
        remark: what a reader must know beside the figures; empty: nothing.
    """

    def __init__(self, path: Path, selection: str = "", remark: str = "") -> None:
        self.path = path.absolute()
        self.selection = selection
        self.remark = remark
        self.started = self.written = time.monotonic()
        self.commit = commit()
        self.chosen = 0
        self.outcomes: dict[str, str] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note how many tests will run, if they run in this process."""
        if session.items:
            self._begin(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Note how many tests will run in other processes, each of which collects them all."""
        self._begin(len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            worse = self.outcomes.get(report.nodeid) == "failed"
            self.outcomes[report.nodeid] = "failed" if worse else report.outcome
        if time.monotonic() - self.written >= INTERVAL:
            self._write(None)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(int(exitstatus))

    def _begin(self, chosen: int) -> None:
        self.chosen = chosen
        self._write(None)  # instead of the page of an earlier run

    def _write(self, exitstatus: int | None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(self.render(exitstatus), encoding="utf-8")
        beside.replace(self.path)  # the run may be ended at any time, and must not leave half a page
        self.written = time.monotonic()

    def render(self, exitstatus: int | None) -> str:
        """Return the page as markdown; ``exitstatus``: None before the end, as it stays if the run is ended."""
        counts = Counter(self.outcomes.values())
        result = "ended" if exitstatus is None else "passed" if exitstatus == 0 else f"exit status {exitstatus}"
        if (missing := self.chosen - len(self.outcomes)) > 0:
            result += f" before {missing} of {self.chosen} tests"
        minutes, seconds = divmod(round(time.monotonic() - self.started), 60)
        found = [f"{name} {version(name)}" for name in DISTRIBUTIONS if version(name)]
        slowest = sorted(self.seconds.items(), key=lambda row: -row[1])[:SLOWEST]
        failed = [name for name, outcome in self.outcomes.items() if outcome == "failed"]
        lines = [
            "# Test run",
            "",
            f"- Date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"- Commit: {self.commit}",
            f"- Tests: {f'those marked {self.selection!r}' if self.selection else 'all'}",
            f"- Machine: {device()}, Python {platform.python_version()}",
            f"- Versions: {', '.join(found)}",
            f"- Result: {result}; " + ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped")),
            f"- Duration: {minutes} min {seconds} s",
            *([f"- Remark: {self.remark}"] if self.remark else []),
            "",
            "| slowest tests | seconds |",
            "| --- | --- |",
            *(f"| {name} | {taken:.1f} |" for name, taken in slowest),
        ]
        if failed:
            lines += ["", "## Failed", "", *(f"- {name}" for name in failed)]
        return "\n".join(lines) + "\n"
