"""Files of a checkpoint folder: checksums, durable writes, checked names, JSON, safetensors headers. No torch in here.

The checksum costs less than a copy: row and column sums of 64-bit words, sealed with BLAKE2. A table of words is
determined by its row and column sums up to changes of at least four words that cancel exactly, so flips, swaps, lost
pages and truncation show. It protects against accidents, not against forgery.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megalight.checkpoint.disk.address import Address
from megalight.errors import CheckpointError

BLOCK = 4 << 20
"""Bytes that share one checksum: a reader that needs part of a chunk reads and verifies whole blocks."""

_ROW = 512
"""Words per row; the running column sums stay in the first-level cache."""


def checksum(data: bytes | memoryview) -> str:
    """16 hex digits for ``data``. One pass over memory at over 10 GB/s per core; releases the GIL."""
    raw = np.frombuffer(data, np.uint8)
    whole = raw.size // (8 * _ROW) * (8 * _ROW)
    # The size is part of the digest: zeros that are lost at the end would not show in sums.
    digest = hashlib.blake2b(raw.size.to_bytes(8, "little"), digest_size=8)
    if whole:
        words = raw[:whole].view("<u8").reshape(-1, _ROW)
        # 64-bit sums wrap around, which loses nothing for this purpose.
        digest.update(words.sum(axis=0, dtype=np.uint64).astype("<u8"))
        digest.update(words.sum(axis=1, dtype=np.uint64).astype("<u8"))
    # What is left is shorter than a row, and goes into the digest itself.
    digest.update(raw[whole:].data)
    return digest.hexdigest()


def blocks(nbytes: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of the checksummed blocks of a chunk of ``nbytes``."""
    for start in range(0, nbytes, BLOCK):
        yield start, min(start + BLOCK, nbytes)


MAX_JSON = 1 << 30
"""Bytes of the largest JSON file that is read."""

MAX_HEADER = 100 << 20
"""Bytes of the largest safetensors header, as in the format's own library."""

CODES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
}
"""Our dtype names (torch's) -> safetensors' code and bytes per element."""

REMOVED = "perhaps it was removed while it was read."
"""Said of files that were there a moment ago."""

TORCH_METADATA = ".metadata"
"""The index that torch's Distributed Checkpoint looks for; the only hidden file that a checkpoint may have."""

TORCH_SUFFIX = ".distcp"
"""Data files with this suffix are torch's archives, not safetensors; they have no header."""

_NAME = re.compile(r"[A-Za-z0-9_\-+=@,][A-Za-z0-9_.\-+=@, ]*")


PathLike: TypeAlias = Path | Address
"""Where a folder or file is: on a local file system, or in remote storage."""

Write = Callable[[bytes | memoryview], None]
"""Puts bytes behind those that a file has."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and checksum of one file.

    Of tensor data files the checksum covers the header, or what is around the tensors of torch's archives; the tensors
    have their own in the index.
    """

    size: int
    checksum: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a safetensors file. ``start`` counts from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * CODES[self.dtype][1]


@dataclass(frozen=True)
class WrittenBox:
    """A box of a canonical tensor that a rank writes.

    Attributes:
        name, shape, dtype: of the whole tensor.
        offset, size: the box, per dim.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def entry(self) -> TensorEntry:
        """Its place in a file: a whole tensor goes by its own name, a part by name and offset."""
        # Parts of a tensor go by their offset, as one file may hold several.
        key = self.name if self.size == self.shape else f"{self.name}@{','.join(map(str, self.offset))}"
        return TensorEntry(key, self.dtype, self.size)


TorchArchive: TypeAlias = tuple[str, tuple[int, ...], str, int, int]
"""Of a tensor inside an archive of torch: name, offset of the box, file, first byte of the archive, bytes."""


def checked_name(name: str) -> str:
    """``name`` if it is a plain relative path that stays inside its folder on every system.

    Raises:
        CheckpointError: it is absolute, climbs out, is hidden, or has odd characters.
    """
    if name == TORCH_METADATA:
        return name
    parts = name.split("/") if isinstance(name, str) else []
    if not 1 <= len(parts) <= 8 or len(name) > 240 or not all(_NAME.fullmatch(part) for part in parts):
        raise CheckpointError(
            f"file name {name!r} in a checkpoint; names are relative paths of letters, digits and _.-+=@, that stay "
            "inside the folder. Rename the file, or do not trust this checkpoint."
        )
    return name


def located(root: Any, name: str) -> Any:
    """The place of a regular file inside a checkpoint; a link that leads elsewhere raises an error.

    Raises:
        CheckpointError: bad name, missing, not a regular file, or reached through a link.
    """
    if isinstance(root, Address):
        # No request: a store has no links, and reading a missing object raises an error.
        return root / checked_name(name)
    path, above = root, []
    for part in checked_name(name).split("/"):
        path = path / part
        above.append(path)
    if not path.exists():
        raise CheckpointError(f"checkpoint {root} is torn: {name} is missing.")
    # A link inside the folder may lead anywhere.
    if not path.is_file() or any(each.is_symlink() for each in above):
        raise CheckpointError(f"{name} in checkpoint {root} is no regular file inside it; copy the file itself there.")
    return path


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of ``data``; the operating system may take less at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def created(path: PathLike) -> AbstractContextManager[Write]:
    """Make a new file, and its folder. At the end of the context, all that was written is safe."""
    return path.upload() if isinstance(path, Address) else _created(path)


@contextmanager
def _created(path: Any) -> Iterator[Write]:
    path.parent.mkdir(parents=True, exist_ok=True)
    # `O_EXCL`: two ranks that write one file would be an error here, and not a mixture.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield partial(write_all, descriptor)
        # On disk before the manifest is, which says that it is.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: PathLike, data: bytes) -> FileRecord:
    """Write a whole new file and bring it to the disk."""
    with created(path) as write:
        write(data)
    return FileRecord(len(data), checksum(data))


def sync_directory(path: PathLike) -> None:
    """Bring a folder's entries to the disk. An object is safe when it has been sent."""
    if isinstance(path, Address):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(root: PathLike, name: str, record: FileRecord) -> bytes:
    """Read a whole small file, and verify it.

    Raises:
        CheckpointError: it is missing, larger than :data:`MAX_JSON`, or differs from its record.
    """
    path = located(root, name)
    if record.size > MAX_JSON:
        raise CheckpointError(f"{name} in checkpoint {root} claims {record.size} bytes; at most {MAX_JSON} are read.")
    try:
        # the size first: the file may have grown beyond memory
        data = path.read_bytes() if path.stat().st_size == record.size else b""
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} in checkpoint {root} is missing; {REMOVED}") from error
    except OSError as error:
        raise CheckpointError(f"{name} in checkpoint {root} cannot be read: {error}.") from error
    if len(data) != record.size or checksum(data) != record.checksum:
        raise CheckpointError(f"checkpoint {root} is torn: {name} differs from what was saved (size or checksum).")
    return data


def dump_json(value: Any) -> bytes:
    """Compact JSON, one top-level key per line so that people can page through it."""
    # JSON has no NaN. Such floats are tagged by `json_values`.
    compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    if not isinstance(value, dict):
        return compact(value).encode()
    # One line per key, without spaces inside: short, and still readable.
    lines = (f"{compact(key)}:{compact(item)}" for key, item in value.items())
    return ("{" + ",\n".join(lines) + "}\n").encode()


def parse_json(data: bytes, what: str) -> Any:
    """JSON from an untrusted file.

    Raises:
        CheckpointError: it is not JSON, or nested beyond reason.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON ({type(error).__name__}: {error}).") from error


def pack_header(entries: Iterable[TensorEntry], metadata: dict[str, str]) -> tuple[bytes, list[TensorEntry]]:
    """The safetensors header (with its length) for concatenated tensors, and the entries with their ``start``."""
    table: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    placed: list[TensorEntry] = []
    for entry in entries:
        stop = position + entry.nbytes
        table[entry.key] = {"dtype": CODES[entry.dtype][0], "shape": entry.shape, "data_offsets": (position, stop)}
        placed.append(TensorEntry(entry.key, entry.dtype, entry.shape, position))
        position = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    # The data starts at a multiple of 8, as the format's own writer has it.
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    header = struct.pack("<Q", len(text)) + text
    return header, [TensorEntry(e.key, e.dtype, e.shape, base + e.start) for e in placed]


def parse_header(data: bytes | memoryview, size: int, what: str) -> list[TensorEntry]:
    """The tensors of a safetensors file of ``size`` bytes that starts with ``data`` (which must hold the header).

    Raises:
        CheckpointError: the header is no safetensors header, lies about sizes, overlaps or leaves gaps.
    """
    # Eight bytes of length, as the format of safetensors begins.
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else MAX_HEADER + 1
    if length > min(MAX_HEADER, size - 8, len(data) - 8):
        raise CheckpointError(f"{what} has a safetensors header of {length} bytes, more than the file allows.")
    table = parse_json(bytes(data[8 : 8 + length]), f"the header of {what}")
    by_code = {code: name for name, (code, _) in CODES.items()}
    position = base = 8 + length
    entries = []
    try:
        table.pop("__metadata__", None)
        # In the order of the data, so that each tensor must begin where the last one ended.
        for key, item in sorted(table.items(), key=lambda pair: pair[1]["data_offsets"]):
            entry = TensorEntry(key, by_code[item["dtype"]], checked_shape(item["shape"], what), position)
            start, stop = item["data_offsets"]
            if (base + start, base + stop) != (position, position + entry.nbytes):
                raise ValueError(f"tensor {key!r} does not follow the one before it")
            position += entry.nbytes
            entries.append(entry)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the header of {what} is malformed: {error}.") from error
    if position != size:
        raise CheckpointError(f"{what} has {size} bytes where its header describes {position}.")
    return entries


def checked_count(value: Any, what: str) -> int:
    """A non-negative 63-bit integer from an untrusted file.

    Raises:
        CheckpointError: it is anything else.
    """
    # `type`, because True is an instance of int.
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise CheckpointError(f"{what} holds {str(value)[:80]!r} where a count or size belongs.")
    return value


def checked_shape(value: Any, what: str) -> tuple[int, ...]:
    """A list of non-negative integers from an untrusted file, as a tuple.

    Raises:
        CheckpointError: it is anything else, or describes more than 2^55 elements.
    """
    if not isinstance(value, (list, tuple)) or len(value) > 32:
        raise CheckpointError(f"{what} holds {str(value)[:80]!r} where a list of sizes belongs.")
    shape = tuple(checked_count(n, what) for n in value)
    # Far below 2^63, so that sizes in bytes cannot overflow.
    if prod(max(n, 1) for n in shape) > 1 << 55:
        raise CheckpointError(f"{what} describes a tensor of impossible size {list(shape)}.")
    return shape
