"""Questions in MT-Bench's format (https://arxiv.org/abs/2306.05685): conversations of several turns, one per line.

A line is ``{"question_id": 81, "category": "writing", "turns": ["Compose ...", "Rewrite ..."]}``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from megalight.errors import DataError, decode_utf8


@dataclass(frozen=True)
class Question:
    """A conversation of which the user's part is known.

    Attributes:
        category: its kind; empty if the file does not say.
        turns: the user's messages.
    """

    category: str
    turns: tuple[str, ...]


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Read a JSONL file. Empty lines are skipped.

    Raises:
        DataError: there is no such file, it has no question, or a line is not of the format. The message names it.
    """
    try:
        # At line feeds alone: `splitlines` divides at characters that may stand in a message, too.
        lines = decode_utf8(Path(path).read_bytes(), str(path), line=1).split("\n")
    except OSError as error:
        raise DataError(f"the questions in {path} cannot be read: {error}") from error
    found = [_question(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{path} has no question; a line is " + '{"category": "writing", "turns": ["Compose ..."]}.')
    return found


def _question(line: str, where: str) -> Question:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    turns = values.get("turns") if isinstance(values, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise DataError(f'{where} needs "turns", a list of messages of the user, each a text that is not empty.')
    return Question(str(values.get("category", "")), tuple(turns))
