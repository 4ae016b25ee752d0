"""Pickles, which torch's Distributed Checkpoint uses: the only file that may touch them.

A pickle names the classes and functions that it wants to be called. Here none of them is looked up: each becomes a
:class:`Record` of what it would have been called with. So a hostile pickle is no more than a strange list of names.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import IO, Any, Self

from megalight.checkpoint.disk.files import CODES, MAX_JSON, Place
from megalight.errors import CheckpointError

PLAIN = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
}
"""What is made as it is, or as its nearest plain value."""


def dumps(value: Any) -> bytes:
    """Return a pickle for torch to read."""
    return pickle.dumps(value)


class Record:
    """An object in a pickle.

    Attributes:
        kind: name of its class, or of the function that would have made it.
        arguments: what that would have been called with.
        state: what it would have got afterwards: mostly its attributes by name.
    """

    kind = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Keep the arguments."""
        record = super().__new__(cls)
        # Named arguments too, by position: what a class would have called them does not matter here.
        record.arguments, record.state = (*arguments, *named.values()), {}
        return record

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Nothing more."""

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    # A subclass of dict or list fills itself by these calls, of which nothing is needed.
    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop what a subclass of dict holds."""

    def append(self, value: Any) -> None:
        """Drop what a subclass of list holds."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        # A hostile pickle can give any state.
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def read(data: bytes, what: str) -> Any:
    """Return what a pickle holds, with records in place of objects, and dtypes by name. Nothing is called.

    Args:
        data: the pickle.
        what: the file, for messages.

    Raises:
        CheckpointError: it is no pickle.
    """
    try:
        return _Records(io.BytesIO(data)).load()
    except Exception as error:  # a broken pickle makes the machine that reads it raise anything
        raise CheckpointError(f"{what} is damaged: it cannot be read ({type(error).__name__}: {error}).") from error


def read_file(path: Place) -> Any:
    """Return the same of a file of ``torch.save``; tensors are records too.

    Raises:
        CheckpointError: it is no such file.
    """
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            (info,) = (info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            # The size that the archive claims, before it is unpacked.
            if info.file_size > MAX_JSON:
                raise ValueError(f"its pickle claims {info.file_size} bytes")
            data = archive.read(info)
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is no file of torch.save ({error}); copy it again.") from error
    return read(data, str(path))


def check_stored(file: str | os.PathLike[str] | IO[bytes]) -> None:
    """Check that an archive of ``torch.save`` is as long in memory as it is on disk.

    Raises:
        ValueError: entries are compressed, which torch never does: a small file could fill the memory.
        zipfile.BadZipFile: it is no archive.
    """
    with zipfile.ZipFile(file) as archive:
        packed = sum(info.file_size for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED)
    if packed:
        raise ValueError(f"it is compressed, and would be {packed} bytes; torch stores entries as they are")


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in CODES:
            return name
        # A class for each name, made here: nothing is looked up or imported.
        return PLAIN.get((module, name)) or type("Record", (Record,), {"kind": f"{module}.{name}"})

    # How `torch.save` refers to the memory of a tensor, which is not needed.
    def persistent_load(self, pid: Any) -> Any:
        return Record(pid)
