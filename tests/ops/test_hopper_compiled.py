"""The attention kernels for Hopper compile, on machines that have no GPU, into what they say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megalight.imports import version
from megalight.ops.attention.hopper import VERSIONS

RELEASE = ".".join((version("triton") or "").split(".")[:2])

pytestmark = [pytest.mark.full, pytest.mark.skipif(RELEASE not in VERSIONS, reason="needs the Triton of these kernels")]


def test_attention_kernels_multiply_the_same_blocks_by_every_way() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_hopper"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("_attention_forward") == done.stdout.count("_attention_backward") == 4
