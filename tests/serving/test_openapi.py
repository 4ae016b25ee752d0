"""The OpenAPI file, by ``schemathesis``: every answer is as it says."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.serving.listening import listening

WHOLE = ["--phases=examples,coverage,fuzzing", "--max-examples=50"]


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
@pytest.mark.parametrize(
    "extent",
    [
        pytest.param(["--phases=fuzzing", "--max-examples=4"], id="short"),
        pytest.param(WHOLE, marks=pytest.mark.full, id="whole"),
    ],
)
def test_all_answers_are_those_of_the_openapi_file(folder: Path, extent: list[str], tmp_path: Path) -> None:
    with listening(folder) as url:
        # 500 is declared nowhere, so it is an error, too. Requests to engines that are paused wait.
        checks = "status_code_conformance,content_type_conformance,response_schema_conformance"
        found = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", checks, *extent,
             "--exclude-path=/pause", "--exclude-path=/suspend", "-H", "Authorization: Bearer control",
             "--request-timeout=60", "--seed=1", "--no-color", "--warnings=off"],
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "Tested: 12" in found.stdout
