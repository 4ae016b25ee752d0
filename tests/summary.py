"""The record of a full test run: tests, machine, versions and results."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from megalight.imports import version

DISTRIBUTIONS = (
    *("megalight", "torch", "lightning", "jsonargparse", "transformers", "numpy", "safetensors", "triton"),
    *("transformer-engine", "apex", "flash-attn"),
)
SLOWEST = 10


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
    """A pytest plugin that writes a markdown page when the session ends.

    Args:
        path: the page.
        selection: the expression of marks (pytest's ``-m``) that chose the tests.
        remark: what a reader must know beside the figures; empty: nothing.
    """

    def __init__(self, path: Path, selection: str = "", remark: str = "") -> None:
        self.path = path.absolute()
        self.selection = selection
        self.remark = remark
        self.started = time.monotonic()
        self.outcomes: dict[str, str] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            worse = self.outcomes.get(report.nodeid) == "failed"
            self.outcomes[report.nodeid] = "failed" if worse else report.outcome

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.render(int(exitstatus)), encoding="utf-8")

    def render(self, exitstatus: int) -> str:
        """Return the page as markdown."""
        counts = Counter(self.outcomes.values())
        minutes, seconds = divmod(round(time.monotonic() - self.started), 60)
        found = [f"{name} {version(name)}" for name in DISTRIBUTIONS if version(name)]
        slowest = sorted(self.seconds.items(), key=lambda row: -row[1])[:SLOWEST]
        failed = [name for name, outcome in self.outcomes.items() if outcome == "failed"]
        lines = [
            "# Test run",
            "",
            f"- Date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"- Commit: {commit()}",
            f"- Tests: {f'those marked {self.selection!r}' if self.selection else 'all'}",
            f"- Machine: {device()}, Python {platform.python_version()}",
            f"- Versions: {', '.join(found)}",
            f"- Result: {'passed' if exitstatus == 0 else f'exit status {exitstatus}'}; "
            + ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped")),
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
