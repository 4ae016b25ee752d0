"""The site shows the pages as they are, without what only the repository understands."""

from importlib import import_module
from types import SimpleNamespace

import yaml

from tests.support.pages import blocks
from tests.support.source import ROOT

docs_site = import_module("docs_site")


def shown(markdown: str, page: str = "performance/index.md") -> str:
    return str(docs_site.on_page_markdown(markdown, page=SimpleNamespace(file=SimpleNamespace(src_uri=page))))


def test_links_out_of_the_pages_become_text() -> None:
    assert shown("[the log](log.md#a) and [data](../data.md)") == "[the log](log.md#a) and [data](../data.md)"
    assert shown("[code](../../megalight/x.py)") == "code (`megalight/x.py`)"
    assert shown("[`README.md`](../README.md)", "index.md") == "`README.md`"
    assert shown("[a](https://b.c/d)") == "[a](https://b.c/d)"


def test_marks_of_executed_blocks_are_dropped() -> None:
    text = "```bash test\nls\n```\n1. in a list\n   ```python test full\n   pass\n   ```\n"
    assert len(blocks(text)) == 2
    assert shown(text) == text.replace(" test full", "").replace(" test", "")


def test_roles_of_docstrings_are_dropped() -> None:
    html = "<p>see :class:<code>~a.b.C</code> and :mod:<code>a.b</code>, not <code>~/x y</code></p>"
    assert docs_site.on_page_content(html) == "<p>see <code>C</code> and <code>a.b</code>, not <code>~/x y</code></p>"


def test_every_page_has_a_place() -> None:
    configuration = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        children = entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else []
        return {page for child in children for page in pages(child)}

    docs = ROOT / "docs"
    written = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert pages(configuration["nav"]) == written | set(import_module("docs_reference").pages())
