"""The documentation runs. A fenced block whose info string says ``test`` is executed::

    ```bash test
    megalight doctor
    ```

``bash`` and ``python`` blocks of one page run in order, each in its own process, in one temporary directory that holds
``recipes`` and ``examples`` as the repository does. ``test full`` is run by ``make test-full`` alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import Block, blocks, execute
from tests.support.source import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
NO_BLOCKS = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
FILE = re.compile(r"`((?:megalight|tests|benchmarks|examples|recipes|docs)/[\w./*-]+)`")


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


@pytest.mark.parametrize("page", [*PAGES, *NO_BLOCKS], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match[1] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", [*PAGES, *NO_BLOCKS], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = FILE.findall(page.read_text(encoding="utf-8"))
    assert not [name for name in named if not any(ROOT.glob(name))]


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / match[1]).resolve() for match in LINK.finditer(index.read_text(encoding="utf-8"))}
    assert {page.name for page in set((ROOT / "docs").rglob("*.md")) - listed - {index}} == set()


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
echo three times && exit 3
```
"""


def test_blocks_of_a_page() -> None:
    first, second, third = blocks(PAGE)
    assert first == Block(2, "bash", "echo one > file\n", full=False)
    assert second == Block(6, "python", 'if True:\n    assert open("file").read() == "one\\n"\n', full=False)
    assert (third.line, third.full) == (13, True)


def test_blocks_share_a_directory(tmp_path: Path) -> None:
    execute(Path("page.md"), blocks(PAGE)[:2], tmp_path)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (blocks(PAGE)[2], r"page\.md:13\n(?s:.*)three times"),
        (Block(4, "python", "print('shown')\nmissing()", False), r"page\.md:4\n(?s:.*)shown\n(?s:.*)NameError"),
        (Block(4, "python", "raise SystemExit(2)", False), r"page\.md:4\n"),
        (Block(4, "bash", "false\ntrue", False), r"page\.md:4\n"),
    ],
)
def test_a_failing_block_names_its_place_and_shows_its_output(block: Block, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        execute(Path("page.md"), [block], tmp_path)


@pytest.mark.parametrize("info", ["bash test often", "rust test"])
def test_a_misspelled_block_is_refused(info: str) -> None:
    with pytest.raises(AssertionError, match=r"unknown flags|cannot be executed"):
        blocks(f"```{info}\n```\n")
