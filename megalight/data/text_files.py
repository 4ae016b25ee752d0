"""Input files of ``prepare`` (text, JSON lines, JSON, CSV, Parquet, WebDataset), read in blocks of about a megabyte.

One process finds and reads the files in a fixed order (:func:`find`, :func:`blocks`). Workers turn blocks into texts
(:func:`texts_of`). So the result does not depend on the number of workers.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from megalight.data import webdataset
from megalight.errors import DataError, decode_utf8
from megalight.hub import local_data
from megalight.imports import require

Kind = Literal["text", "jsonl", "json", "csv", "parquet", "webdataset"]
Format = Literal["auto", "text", "jsonl", "json", "csv", "parquet"]
OnBad = Literal["raise", "skip"]
BLOCK = 1 << 20
LINES = "If each of its lines is a row, say so with format='jsonl' (--format jsonl)."

SKIP = "or skip bad files with on_bad='skip' (--skip-bad)."
SKIP_ROWS = "Leave such rows out, or skip them with on_bad='skip' (--skip-bad)."

SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
ROWS: dict[str, Kind] = {**SUFFIXES, ".json": "json", ".tar": "webdataset"}
"""Suffixes where inputs can only be rows: for text, a ``.json`` file is a document, and a ``.tar`` file is left out."""
COMPRESSED = {".zst": "zstd -d", ".xz": "xz -d", ".bz2": "bzip2 -d", ".lz4": "lz4 -d", ".br": "brotli -d"}
"""Suffixes of compressed files that are not read, and what decompresses them."""
ARCHIVES = (".tar", ".tgz", ".zip", ".7z", ".rar")
"""Suffixes of several files in one. In a directory they are left out, as all binary files are."""
UNITS: dict[Kind, str] = {"json": "entry", "csv": "row"}
"""What a row of such a file is called in messages; a line elsewhere."""
READ_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class TextFile:
    """An input file and its format."""

    path: Path
    kind: Kind
    size: int

    @property
    def compressed(self) -> bool:
        """Whether the file is read through gzip."""
        return self.path.suffix.lower() == ".gz"


@dataclass(frozen=True)
class FileChunk:
    """A part of one file.

    Attributes:
        data: bytes of text or of whole JSON lines, one for each entry of a JSON array and each row of a CSV file; the
            places of samples of a WebDataset shard; empty for Parquet.
        first: number of the first line (text, JSON lines), entry (JSON), row (CSV) or sample, or the row group
            (Parquet).
        ends: whether the document ends with this piece. Only a text file can have a document of several pieces.
        size: bytes of the input file that this piece accounts for, for the progress bar.
        start: position of the first byte of text or JSON lines in the decompressed file.
    """

    path: Path
    kind: Kind
    data: bytes
    first: int
    ends: bool
    size: int
    start: int = 0


Block = tuple[FileChunk, ...]


@dataclass(frozen=True)
class Text:
    """A text, and whether it is the end of its document."""

    text: str
    ends: bool


def find(inputs: Sequence[str], form: Format = "auto", suffixes: Mapping[str, Kind] = SUFFIXES) -> list[TextFile]:
    """Find the files that the inputs name, in a fixed order, each once.

    An input is a name of a data set (:func:`megalight.hub.local_data`), a file, a glob pattern (``**`` is allowed), or
    a directory. A directory stands for all files below it, in sorted order, without hidden files and without binary
    files (a zero byte in the first 8 KiB, as in git). Symbolic links are followed; a folder that is reached twice, such
    as by a cycle of links, is read once.

    Args:
        form: format of all files; ``auto``: by the suffix.
        suffixes: suffix -> format. Other files are text.

    Raises:
        DataError: an input names no file, or a ``.json`` file whose format must be told; or a file is compressed
            otherwise than by gzip, or an archive that is named.
    """
    found: dict[Path, TextFile] = {}
    # In the order of the inputs, which is the order of the documents.
    for given in map(local_data, inputs):
        try:
            paths = _named(given, form, suffixes)
        except OSError as error:  # a folder on the way may be closed
            raise DataError(f"input {given!r} cannot be read ({error.strerror}).") from error
        if not paths:
            raise DataError(f"input {given!r} names no file; give a file, a directory, or a glob in quotes.")
        _check_readable(paths, suffixes)
        for path in paths:
            kind = suffixes.get(_suffix(path), "text") if form == "auto" else form
            found.setdefault(path, TextFile(path, kind, path.stat().st_size))
    if not found:
        raise DataError("no input was given; give at least one file, directory or glob.")
    return list(found.values())


def _named(given: str, form: Format, suffixes: Mapping[str, Kind]) -> list[Path]:
    """Return the files that one input names."""
    place = Path(given)
    if place.is_dir():
        return _below(place, suffixes)
    if not place.exists():
        return _matching(given)
    if form == "auto" and _suffix(place) == ".json" and ".json" not in suffixes:
        raise DataError(
            f"input {given!r} may be one document or an array of rows; say which with format='text' or 'json' "
            "(--format)."
        )
    return [place]


def _matching(pattern: str) -> list[Path]:
    """Return the files that match. Where links form cycles, a file has many names; its shortest is taken."""
    found: dict[tuple[str, str], str] = {}
    for name in sorted(glob.glob(pattern, recursive=True), key=lambda name: (name.count(os.sep), name)):
        if os.path.isfile(name):
            folder, base = os.path.split(name)
            found.setdefault((os.path.realpath(folder), base), name)
    return [Path(name) for name in sorted(found.values())]


def _check_readable(paths: Sequence[Path], suffixes: Container[str]) -> None:
    for path in paths:
        if (last := path.suffix.lower()) in COMPRESSED:
            raise DataError(
                f"{path} is compressed, and only .gz files are decompressed here: decompress it first "
                f"({COMPRESSED[last]}), or leave it out."
            )
        if (inner := _suffix(path)) in ARCHIVES and inner not in suffixes:
            shards = ", or shards with --multimodal" if inner == ".tar" else ""
            raise DataError(f"{path} is an archive: unpack it, and give the files{shards}.")


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _below(folder: Path, suffixes: Mapping[str, Kind]) -> list[Path]:
    known = COMPRESSED.keys() | {*suffixes}  # the first of these are refused, and not left out without a word
    try:
        return [
            path
            for path in _walk(folder, set())
            if _suffix(path) in known or not (_suffix(path) in ARCHIVES or _binary(path))
        ]
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error}") from error


def _walk(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Yield the files below a folder. ``seen`` holds the folders that were read, as links may form cycles."""
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry, seen)
        elif entry.is_file():
            yield entry


def _binary(path: Path) -> bool:
    if path.suffix.lower() == ".gz":
        return False
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(8192)
    except OSError:
        return False  # reading it later raises an error that names it


def blocks(files: Sequence[TextFile], on_bad: OnBad = "raise", skipped: list[str] | None = None) -> Iterator[Block]:
    """Read the files in blocks of about a megabyte: a piece of a large file, or several small files.

    Args:
        on_bad: what happens with a file that cannot be read or is not UTF-8: ``raise``, or ``skip`` the file.
        skipped: receives a message for each file that is skipped.
    """
    block: list[FileChunk] = []
    size = 0
    for file in files:
        try:
            if on_bad == "skip":
                _check(file)
            for piece in _pieces(file):
                block.append(piece)
                size += len(piece.data) if READERS[piece.kind].holds_bytes else BLOCK
                if size >= BLOCK:
                    yield tuple(block)
                    block, size = [], 0
        except DataError as error:
            if on_bad == "raise":
                raise
            if skipped is not None:
                skipped.append(str(error))
    if block:
        yield tuple(block)


def _check(file: TextFile) -> None:
    """Read the whole file before any of its pieces is used, so that a bad file is skipped as a whole."""
    for piece in _pieces(file):
        if piece.kind == "text":
            _decode(piece)


def _pieces(file: TextFile) -> Iterator[FileChunk]:
    try:
        yield from READERS[file.kind].pieces(file)
    except READ_ERRORS as error:
        raise DataError(f"{file.path} cannot be read ({error}); repair it, {SKIP}") from error


def _lines(source: TextFile) -> Iterator[FileChunk]:
    """Pieces of about a megabyte that end at line ends. Only the last piece of a text ends its document."""
    opener = gzip.open if source.compressed else open
    with cast(BinaryIO, opener(source.path, "rb")) as file:
        line, start, data = 1, 0, _chunk(file)
        while True:
            # One chunk ahead, because a piece must say whether it ends its document.
            following = _chunk(file) if data else b""
            last = not following
            # Progress counts bytes of the input: of a compressed file they are only known for the whole.
            size = len(data) if not source.compressed else source.size if last else 0
            yield FileChunk(source.path, source.kind, data, line, last, size, start)
            if last:
                return
            line += data.count(b"\n")
            start += len(data)
            data = following


def _entries(source: TextFile) -> Iterator[FileChunk]:
    """Pieces of about a megabyte of a JSON array, with a line for each entry. The array is read as a whole."""
    opener = gzip.open if source.compressed else open
    with cast(BinaryIO, opener(source.path, "rb")) as file:
        text = decode_utf8(file.read(), str(source.path), 0, 1, f"convert it, {SKIP}")
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            advice = f" {LINES}" if _goes_on(error) else ""
            raise DataError(f"{source.path} is not JSON: {error}.{advice}") from error
    if not isinstance(entries, list):
        raise DataError(
            f"{source.path} holds a {type(entries).__name__}; a .json file must hold an array of rows. {LINES}"
        )
    yield from _joined(source, map(_dumped, entries), 0)


def _dumped(entry: Any) -> bytes:
    return json.dumps(entry).encode()


CSV_SEPARATORS = {".tsv": "\t"}
"""Suffix -> what stands between two values. A comma elsewhere."""


def csv_lines(file: Iterable[str], path: Path, suffix: str) -> Iterator[bytes]:
    """Yield each row of a CSV file as a line of JSON, with the columns that its first row names as keys.

    Args:
        file: the lines of the text, with their ends.
        suffix: of the name, without ``.gz``.

    Raises:
        DataError: the file is no CSV, two columns have one name, or a row has more or fewer values than
            there are columns.
    """
    # Values may be longer than 128 KiB, Python's default.
    csv.field_size_limit(sys.maxsize)
    separator = CSV_SEPARATORS.get(suffix, ",")
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


def _table(source: TextFile) -> Iterator[FileChunk]:
    """Pieces of about a megabyte of a CSV file, with a line of JSON for each row under the names of the columns."""
    opener = gzip.open if source.compressed else open
    with cast(BinaryIO, opener(source.path, "rb")) as file:
        yield from _joined(source, csv_lines(_decoded(file, source.path), source.path, _suffix(source.path)), 1)


def _decoded(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the lines of a table, which end as they do in the file."""
    at = 0
    for number, line in enumerate(file, 1):
        text = decode_utf8(line, str(path), at, number, f"convert it, {SKIP}")
        # A lone carriage return ends a line, too.
        yield from filter(None, re.split(r"(?<=\r)(?!\n)", text))
        at += len(line)


def _joined(source: TextFile, rows: Iterable[bytes], first: int) -> Iterator[FileChunk]:
    """Join lines of JSON to pieces of about a megabyte. ``first`` is the number of the first row."""
    lines: list[bytes] = []
    size = 0
    for number, row in enumerate(rows, first + 1):
        lines.append(row)
        size += len(row)
        if size >= BLOCK:
            yield FileChunk(source.path, source.kind, b"\n".join(lines), first, True, 0)
            lines, size, first = [], 0, number
    # Progress counts bytes of the input, which are only known for the whole.
    yield FileChunk(source.path, source.kind, b"\n".join(lines), first, True, source.size)


def _chunk(file: BinaryIO) -> bytes:
    data = file.read(BLOCK)
    # To the end of the line, so that no JSON line and no character is cut.
    return data + file.readline() if len(data) == BLOCK else data


def _row_groups(source: TextFile) -> Iterator[FileChunk]:
    file = _parquet(source.path)
    count = max(1, file.num_row_groups)
    for group in range(file.num_row_groups):
        size = source.size * (group + 1) // count - source.size * group // count
        yield FileChunk(source.path, "parquet", b"", group, True, size)


def _samples(source: TextFile) -> Iterator[FileChunk]:
    for first, places, size in webdataset.groups(source.path):
        yield FileChunk(source.path, "webdataset", places, first, True, size)


def _parquet(path: Path) -> Any:
    parquet = require("pyarrow.parquet", f"reading {path.name}")
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise DataError(f"{path} is not a readable Parquet file ({error}). Is it incomplete?") from error


def texts_of(block: Block, text_key: str, on_bad: OnBad = "raise") -> tuple[list[Text], list[str]]:
    """Return the texts of a block, and one message per row that was skipped.

    Raises:
        DataError: with ``on_bad="raise"``: a text is not UTF-8, a line is not a JSON object, or it has no string at
            ``text_key``. The message names the file and the line.
    """
    texts: list[Text] = []
    skipped: list[str] = []
    for piece in block:
        for text in READERS[piece.kind].texts(piece, text_key):
            if isinstance(text, Text):
                texts.append(text)
            elif on_bad == "raise":
                raise text
            else:
                skipped.append(str(text))
    return texts, skipped


def _document(piece: FileChunk, key: str) -> Iterator[Text | DataError]:
    """The text of a piece that is nothing else."""
    yield Text(_decode(piece), piece.ends)


def _texts(piece: FileChunk, key: str) -> Iterator[Text | DataError]:
    """The texts of rows, or why there is none."""
    for place, record in READERS[piece.kind].rows(piece):
        if isinstance(record, DataError):
            yield record
        elif not isinstance(record, dict):
            array = " An array of rows is read with format='json' (--format json)." if isinstance(record, list) else ""
            yield DataError(f"{place} is of type {type(record).__name__}; each row must be a JSON object.{array}")
        elif key not in record:
            keys = ", ".join(map(repr, record))
            yield DataError(f"{place} has no key {key!r}; it has: {keys}. Choose one with text_key (--text-key).")
        else:
            yield _text(place, key, record[key])


def _json_rows(piece: FileChunk) -> Iterator[tuple[str, Any]]:
    """Each line of JSON, or why it is none, with its place for messages."""
    unit = UNITS.get(piece.kind, "line")
    # At line feeds alone, as `_lines` counts them. `splitlines` divides at other characters, too.
    start = piece.start
    for number, line in enumerate(piece.data.split(b"\n"), piece.first):
        if line.strip():
            place = f"{piece.path} {unit} {number}"
            try:
                yield place, _json(place, line, start)
            except DataError as error:
                yield place, error
        start += len(line) + 1


def _text(place: str, key: str, value: Any) -> Text | DataError:
    if not isinstance(value, str):
        name = "null" if value is None else f"of type {type(value).__name__}"
        return DataError(f"{place}: {key!r} is {name}; it must be a string. {SKIP_ROWS}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may hold half of a surrogate pair, which is no text
        return DataError(f"{place}: {key!r} is not Unicode text ({error.reason}). {SKIP_ROWS}")
    return Text(value, True)


def _decode(piece: FileChunk) -> str:
    return decode_utf8(piece.data, str(piece.path), piece.start, piece.first, f"convert it, {SKIP}")


def records_of(block: Block) -> Iterator[tuple[str, Any]]:
    """Yield the JSON lines, Parquet rows and samples of a block, each with its place (file and line) for messages.

    A line that is not JSON is yielded as the :class:`~megalight.errors.DataError` that says so.

    Raises:
        DataError: a file is neither, or is damaged.
    """
    for piece in block:
        yield from READERS[piece.kind].rows(piece)


def _no_rows(piece: FileChunk) -> Iterator[tuple[str, Any]]:
    raise DataError(
        f"{piece.path} has no rows by its name; conversations are rows of .json, .jsonl, .csv or .parquet files. Say "
        "with format (--format) if it is one under another name."
    )


def _parquet_rows(piece: FileChunk) -> Iterator[tuple[str, Any]]:
    rows = _parquet(piece.path).read_row_group(piece.first).to_pylist()
    for row, record in enumerate(rows):
        # absent keys of a row are nulls in its table
        kept = {key: value for key, value in record.items() if value is not None}
        yield f"{piece.path} row group {piece.first}, row {row}", kept


def _sample_rows(piece: FileChunk) -> Iterator[tuple[str, Any]]:
    return webdataset.records(piece.path, piece.data)


def _json(place: str, line: bytes, start: int) -> Any:
    # Not `json.loads(bytes)`, which guesses an encoding for each line by itself.
    text = decode_utf8(line, place, start, advice="convert the file, or skip bad rows with on_bad='skip' (--skip-bad).")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        advice = "Is the file incomplete?"
        if _goes_on(error):
            advice = "Each line holds one value, and something follows it here. Is a line break missing?"
        elif start == 0 and text.lstrip().startswith("["):
            advice = "An array of rows is read with format='json' (--format json)."
        raise DataError(f"{place} is not JSON ({error}). {advice}") from error


def _goes_on(error: Exception) -> bool:
    """Return whether a value of JSON was whole, and something follows."""
    return isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"


def _column(piece: FileChunk, key: str) -> Iterator[Text | DataError]:
    """The texts of a row group, or why there is none."""
    file = _parquet(piece.path)
    names = file.schema_arrow.names
    if names.count(key) != 1:
        if piece.first == 0:  # once for the file
            fault = (
                f"{names.count(key)} columns called {key!r}; give them different names."
                if key in names
                else f"no column {key!r}; it has: {', '.join(names)}. Choose one with text_key (--text-key)."
            )
            yield DataError(f"{piece.path} has {fault}")
        return
    place = f"{piece.path} row group {piece.first}"
    try:
        values = file.read_row_group(piece.first, columns=[key]).column(0).to_pylist()
    except (OSError, ValueError) as error:
        yield DataError(f"{place} cannot be read: {error}")
        return
    for row, value in enumerate(values):
        yield _text(f"{place}, row {row}", key, value)


class FileReader(NamedTuple):
    """How files of one kind are read.

    Attributes:
        pieces: divides a file into pieces.
        texts: the texts of a piece, by the key of its rows, or why there is none.
        rows: the rows of a piece, each with its place for messages.
        holds_bytes: whether pieces hold the bytes that they stand for. Others (row groups, samples) hold their places,
            and count as a whole block.
    """

    pieces: Callable[[TextFile], Iterator[FileChunk]]
    texts: Callable[[FileChunk, str], Iterator[Text | DataError]]
    rows: Callable[[FileChunk], Iterator[tuple[str, Any]]]
    holds_bytes: bool = True


READERS: dict[Kind, FileReader] = {
    "text": FileReader(_lines, _document, _no_rows),
    "jsonl": FileReader(_lines, _texts, _json_rows),
    "json": FileReader(_entries, _texts, _json_rows),
    "csv": FileReader(_table, _texts, _json_rows),
    "parquet": FileReader(_row_groups, _column, _parquet_rows, holds_bytes=False),
    "webdataset": FileReader(_samples, _texts, _sample_rows, holds_bytes=False),
}
