"""The places where texts hold their final answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from megalight.errors import ConfigurationError
from megalight.rl.rewards.numbers import last_number

Mark = Literal["boxed", "tags", "hashes", "last_number"]
TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
BRACES = re.compile(r"\\[{}]|\\f?box(?:ed)?\s*\{|[{}]")
"""Escaped braces, which are only signs; the beginning of a box; and braces that hold something."""


def boxed(text: str) -> str | None:
    r"""Return what the last closed ``\boxed{...}`` holds, or None. Of boxes in boxes, it is the innermost."""
    found: str | None = None
    open_braces: list[tuple[bool, int]] = []
    inner = -1
    for brace in BRACES.finditer(text):
        if brace[0] == "}" and open_braces:
            box, start = open_braces.pop()
            if box and inner < start:  # else the box that ended last lies in this one
                found, inner = text[start : brace.start()], start
        elif brace[0].endswith("{") and brace[0] != "\\{":
            open_braces.append((len(brace[0]) > 1, brace.end()))
    return found


def tags(text: str) -> str | None:
    """Return what the last closed ``<answer>...</answer>`` holds, or None."""
    found, start = None, -1
    for tag in TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start >= 0:
            found, start = text[start : tag.start()], -1
    return found


def hashes(text: str) -> str | None:
    """Return the rest of the line after the last ``####``, as solutions of GSM8K end, or None."""
    _, mark, after = text.rpartition("####")
    return after.strip().partition("\n")[0] if mark else None


MARKS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed,
    "tags": tags,
    "hashes": hashes,
    "last_number": last_number,
}
"""Name of a mark -> what finds the last one in a text."""


def check_marks(marks: Sequence[str]) -> None:
    """Refuse names that are no marks.

    Raises:
        ConfigurationError: with the name.
    """
    for mark in marks:
        if mark not in MARKS:
            raise ConfigurationError(f"marks has {mark!r}; it must be some of {', '.join(get_args(Mark))}.")
    if not marks:
        raise ConfigurationError(f"marks is empty; name some of {', '.join(get_args(Mark))}.")


def marked(text: str, marks: Sequence[str]) -> str | None:
    """Return what the first of these marks that occurs in a text holds, or None."""
    return next((found for mark in marks if (found := MARKS[mark](text)) is not None), None)
