"""Hooks of the documentation's site, which holds the pages of ``docs`` alone.

Links to other files become text, and the marks of blocks that tests execute are dropped.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)\s]*)?\)")

MARKED = re.compile(r"^( *```\w+) test(?: full)?$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace ``[text](../megalight/x.py)`` by the text and the file's path, and ``python test`` by ``python``."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, match[2]))
        if target.startswith("docs/"):
            return match[0]
        return match[1] if match[1].strip("`") == target else f"{match[1]} (`{target}`)"

    return LINK.sub(replaced, MARKED.sub(r"\1", markdown))
