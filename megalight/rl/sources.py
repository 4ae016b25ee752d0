"""Where the rows of prompts come from: files, or a generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from megalight.data.text_files import ROWS, Format, blocks, find, records_of
from megalight.errors import DataError

Row = Mapping[str, Any]
SUFFIXES = {suffix: kind for suffix, kind in ROWS.items() if kind != "webdataset"}
"""Suffix -> format; shards hold images, of which prompts have none."""


class RowSource(ABC):
    """Makes rows without files. A subclass says which; equal arguments must give equal rows, on every rank."""

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """Return the rows, each with a prompt and what rewards need."""


def read_rows(inputs: Sequence[str], form: Format = "auto") -> list[tuple[str, Row]]:
    """Return the rows of files with their places for messages, in the order of :func:`~megalight.data.text_files.find`.

    Args:
        inputs: files (``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet``, also packed by gzip), directories, or
            globs.
        form: format of all files; ``auto``: by the suffix.

    Raises:
        DataError: an input names no file, or a file cannot be read or has a row that is no JSON object.
    """
    found: list[tuple[str, Row]] = []
    for block in blocks(find(inputs, form, SUFFIXES)):
        for place, record in records_of(block):
            if isinstance(record, DataError):
                raise record
            if not isinstance(record, Mapping):
                raise DataError(f"{place} is of type {type(record).__name__}; each row must be a JSON object.")
            found.append((place, record))
    return found
