"""Find and run the executable blocks of documentation pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.support import interpreters
from tests.support.programs import SECONDS, forked
from tests.support.source import ROOT

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]+)\n(?P<text>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
SHARED = ("recipes", "examples")


@dataclass(frozen=True)
class Block:
    """An executable block: its place, its language, its text, and whether only full test runs execute it."""

    line: int
    language: str
    text: str
    full: bool


def blocks(markdown: str) -> list[Block]:
    """Return the blocks with ``test`` in their info string."""
    found = []
    for match in FENCE.finditer(markdown):
        language, *flags = match["info"].split()
        if "test" in flags:
            assert set(flags) <= {"test", "full"}, f"unknown flags {flags}"
            assert language in ("bash", "python"), f"{language} cannot be executed"
            text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            found.append(Block(markdown.count("\n", 0, match.start()) + 1, language, text, "full" in flags))
    return found


def execute(page: Path, found: list[Block], directory: Path) -> None:
    """Run blocks in order. Fail at the first failing block, with its place and its output."""
    for name in SHARED:
        if (ROOT / name).exists():
            (directory / name).symlink_to(ROOT / name)
    environment = {**interpreters.environment(), "MPLBACKEND": "agg", "COLUMNS": "120"}
    for block in found:
        output = directory / ".output"
        run = run_bash if block.language == "bash" else run_python
        status = run(block.text, directory, environment, output)
        assert status == 0, f"{page.name}:{block.line}\n{block.text}\n{output.read_text(encoding='utf-8')}"


def run_bash(text: str, directory: Path, environment: dict[str, str], output: Path) -> int:
    """Run a script that stops at its first error, and return its exit status."""
    with output.open("w") as file:
        command = ["bash", "-euo", "pipefail", "-c", text]
        answer = subprocess.run(
            command, cwd=directory, env=environment, timeout=SECONDS, stdout=file, stderr=subprocess.STDOUT
        )
        return answer.returncode


def run_python(text: str, directory: Path, environment: dict[str, str], output: Path) -> int:
    """Run a program in a process forked from one that has imported torch and Lightning, and return its exit status."""
    return forked(_program, text, directory, environment, output, output=output)


def _program(text: str, directory: Path, environment: dict[str, str], output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    os.chdir(directory)
    import torch

    torch.set_num_threads(1)
    try:
        exec(compile(text, "<page>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
