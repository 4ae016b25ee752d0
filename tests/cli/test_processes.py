"""Commands that several processes share: none waits for the pipe of another, and a failure is told at once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from megalight.cli import processes

WORDY = 1 << 20
"""Bytes: more than a pipe holds."""

PARTS = {
    "all well": """
        [ "$part" = 0 ] && { until [ -e done ]; do sleep 0.01; done; echo "folder: 8 samples of 4 tokens"; exit; }
        head -c WORDY /dev/zero | tr "\\0" x >&2; echo "folder: part 1 of 2 is there"; touch done""",
    "one fails": """
        [ "$part" = 0 ] && exec sleep 600
        head -c WORDY /dev/zero | tr "\\0" x; echo "no room on the disk" >&2; exit 3""",
    "the first fails": """
        [ "$part" = 1 ] && exec sleep 600
        exit 4""",
}
"""What the processes do, as shell."""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def share(python: Path, what: str) -> int:
    python.write_text("#!/bin/sh\npart=${4#--part=}; part=${part%/*}\n" + PARTS[what].replace("WORDY", str(WORDY)))
    python.chmod(0o755)
    return processes.run_processes(
        "cache-logits", argparse.Namespace(processes=2, part=(0, 1), words=["--processes=2", "a"])
    )


def test_pipes_are_read_while_the_first_part_works(python: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert share(python, "all well") == 0
    assert capfd.readouterr() == ("folder: 8 samples of 4 tokens\n", "")


@pytest.mark.parametrize(
    ("what", "code", "told"), [("one fails", 3, "no room on the disk\n"), ("the first fails", 4, "")]
)
def test_a_part_that_fails_stops_the_others(
    python: Path, capfd: pytest.CaptureFixture[str], what: str, code: int, told: str
) -> None:
    assert share(python, what) == code
    assert capfd.readouterr() == ("", told)
