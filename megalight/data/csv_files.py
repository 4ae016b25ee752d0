"""CSV and TSV files as JSON lines: the first row names the columns, and each later one is a line."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from megalight.errors import DataError

SEPARATORS = {".tsv": "\t"}
"""Suffix -> what stands between two values. A comma elsewhere."""


def lines(file: Iterable[str], path: Path, suffix: str) -> Iterator[bytes]:
    """Yield each row as a line of JSON, with the names of the columns as keys.

    Args:
        file: the lines of the text, with their ends.
        path: the file, for messages.
        suffix: of the name, without ``.gz``.

    Raises:
        DataError: the file is no CSV, two columns have one name, or a row has more or fewer values than
            there are columns.
    """
    # Values may be longer than 128 KiB, Python's default.
    csv.field_size_limit(sys.maxsize)
    separator = SEPARATORS.get(suffix, ",")
    reader = csv.reader(file, delimiter=separator, strict=True)
    try:
        names = next((row for row in reader if row), [])
        twice = next((name for name in names if name and names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{path} has {names.count(twice)} columns called {twice!r}; give them different names.")
        for row in reader:
            if not row:  # an empty line
                continue
            if len(row) != len(names):
                raise DataError(
                    f"{path} line {reader.line_num} has {len(row)} values, but the first line names {len(names)} "
                    f"columns ({', '.join(names)}). Values with {separator!r} or line breaks stand in double quotes."
                )
            yield json.dumps(dict(zip(names, row, strict=True))).encode()
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num} is not CSV ({error}). Is the file incomplete?") from error
