"""The documentation runs. A fenced block whose info string says ``test`` is executed::

    ```bash test
    megalight doctor
    ```

``bash`` and ``python`` blocks of one page run in order, each in its own process, in one temporary directory that holds
``recipes`` and ``examples`` as the repository does. ``test full`` is run by ``make test-full`` alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.source import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]+)\n(?P<text>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
SHARED = ("recipes", "examples")
SECONDS = 200


@dataclass(frozen=True)
class Block:
    """An executable block: where it starts, its language, its text, and whether only whole runs execute it."""

    line: int
    language: str
    text: str
    full: bool

    @property
    def command(self) -> list[str]:
        programs = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
        return [*programs[self.language], self.text]


def blocks(markdown: str) -> list[Block]:
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
    """Run blocks in order; the first that fails fails the page, with its place and its output."""
    for name in SHARED:
        if (ROOT / name).exists():
            (directory / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "MPLBACKEND": "agg", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    for block in found:
        answer = subprocess.run(
            block.command, cwd=directory, env=environment, timeout=SECONDS,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert answer.returncode == 0, f"{page.name}:{block.line}\n{block.text}\n{answer.stdout}"


def pages(full: bool) -> list[Path]:
    """Pages with a block that only whole runs execute, or with one that every run does."""
    return [page for page in PAGES if full in {block.full for block in blocks(page.read_text(encoding="utf-8"))}]


@pytest.mark.parametrize("page", pages(full=False), ids=lambda page: page.name)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    execute(page, [block for block in blocks(page.read_text(encoding="utf-8")) if not block.full], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", pages(full=True), ids=lambda page: page.name)
def test_whole_page_runs(page: Path, tmp_path: Path) -> None:
    execute(page, blocks(page.read_text(encoding="utf-8")), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match[1] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / match[1]).resolve() for match in LINK.finditer(index.read_text(encoding="utf-8"))}
    assert not set((ROOT / "docs").rglob("*.md")) - listed - {index}


PAGE = """
```bash test
echo one > file
```
1. indented
   ```python test
   if True:
       assert open("file").read() == "one\\n"
   ```
```bash
exit 1
```
```bash test full
exit 3
```
"""


def test_blocks_of_a_page() -> None:
    first, second, third = blocks(PAGE)
    assert first == Block(2, "bash", "echo one > file\n", full=False)
    assert second == Block(6, "python", 'if True:\n    assert open("file").read() == "one\\n"\n', full=False)
    assert (third.line, third.full) == (13, True)


def test_blocks_share_a_directory_and_failures_name_their_place(tmp_path: Path) -> None:
    found = blocks(PAGE)
    execute(Path("page.md"), found[:2], tmp_path)
    (tmp_path / "again").mkdir()
    with pytest.raises(AssertionError, match=r"page\.md:13\n"):
        execute(Path("page.md"), found[2:], tmp_path / "again")


@pytest.mark.parametrize("info", ["bash test often", "rust test"])
def test_a_misspelt_block_is_refused(info: str) -> None:
    with pytest.raises(AssertionError, match=r"unknown flags|cannot be executed"):
        blocks(f"```{info}\n```\n")
