"""The example of a tower in a layout of its own: it learns, and other layouts have the same losses."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.interpreters import environment
from tests.support.source import ROOT

EXAMPLE = str(ROOT / "examples" / "towers.py")


def losses(ranks: int, *words: str) -> list[float]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [*launcher, EXAMPLE, "--accelerator", "cpu", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    (told,) = re.findall(r"^losses: (.*)$", run.stdout, re.MULTILINE)
    return [float(word) for word in told.replace("...", "").split()]


@pytest.mark.full
def test_it_learns_in_every_layout() -> None:
    found = losses(2)
    assert found[0] > 1.5
    assert found[-1] < 0.1
    disjoint = losses(4, "--placement", "disjoint", "--tower-ranks", "2", "--tower-tensor-parallel", "2")
    assert disjoint[:2] == pytest.approx(found[:2], abs=2e-3)
