"""The OpenAPI file, by ``schemathesis``, whose command is run if it is installed: every answer is as it says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import interpreters

COMMAND = shutil.which("schemathesis")


@pytest.mark.full
@pytest.mark.skipif(COMMAND is None, reason="schemathesis is not installed")
def test_all_answers_are_those_of_the_openapi_file(folder: Path) -> None:
    words = ["megalight", "serve", str(folder), "--device=cpu", "--port=0", "--control-key=control"]
    with subprocess.Popen(words, env=interpreters.environment(), stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            place = next(line for line in server.stderr if "http://" in line).split()[-1]
            # 500 is declared nowhere, so it is an error, too; 503 is: a test may suspend the engine.
            checks = "status_code_conformance,content_type_conformance,response_schema_conformance"
            found = subprocess.run(
                [str(COMMAND), "run", f"{place}/openapi.json", "--checks", checks, "--phases=coverage",
                 "-H", "Authorization: Bearer control", "--request-timeout=60", "--no-color"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert found.returncode == 0, found.stdout[-4000:]
        finally:
            server.kill()
