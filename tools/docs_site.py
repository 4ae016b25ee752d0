"""Hooks of the documentation's site, which holds the pages of ``docs`` alone.

Links to other files become text, and the marks of blocks that tests execute are dropped. The reference pages are made
from the code.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs imports this file by its path
from docs_reference import pages

LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)\s]*)?\)")

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):(?=<code>)")
"""Sphinx roles of docstrings, which mkdocstrings keeps as text."""

MARKED = re.compile(r"^( *```\w+) test(?: full)?$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace ``[text](../megalight/x.py)`` by the text and the file's path, and ``python test`` by ``python``."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, match[2]))
        if target.startswith("docs/"):
            return match[0]
        return match[1] if match[1].strip("`") == target else f"{match[1]} (`{target}`)"

    return LINK.sub(replaced, MARKED.sub(r"\1", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Drop Sphinx roles, and the marks that shorten a name (``:class:`~a.b.C``` becomes ``C``)."""
    return re.sub(r"<code>~[\w.]*?(\w+)</code>", r"<code>\1</code>", ROLE.sub("", html))
