"""A process ends well whatever gloo's threads are at."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's schedulers")
def test_threads_that_hold_tensors_do_not_abort_the_exit() -> None:
    command = [sys.executable, "-m", "tests.parallel.exits", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
