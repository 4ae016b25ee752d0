"""The Triton kernels compile for the GPU they are meant for, on machines that have none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megalight.imports import has

pytestmark = [pytest.mark.full, pytest.mark.skipif(not has("triton"), reason="needs triton")]


def test_kernels_compile_for_sm_90() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for op in (
        "norm",
        "rotary",
        "activation",
        "cross_entropy",
        "adam",
        "linear",
        "attention_merge",
        "scaled_accumulate",
        "router",
        "permute",
        "grouped_linear",
    ):
        assert f"megalight.ops.{op}.triton" in done.stdout
