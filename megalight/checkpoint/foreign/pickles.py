"""Pickles, which torch's Distributed Checkpoint uses: the only file that reads them.

A pickle names classes and functions to be called. Here none of them is looked up: each becomes a :class:`Record` of its
arguments. So a hostile pickle is no more than a list of names.

:func:`check` looks at the instructions before any of them runs: none may ask for more memory than the pickle has bytes.
Python's unpickler in C allocates what an instruction claims before it looks for the bytes: a pickle of 20 bytes that
stores an object as number 4,294,967,295 takes 64 GiB. Opcodes and arguments are those of ``pickletools``.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from typing import IO, Any, Self

from megalight.checkpoint.disk.files import CODES, MAX_JSON, PathLike
from megalight.errors import CheckpointError

SIZES = {ord(each.code): each.arg.n if each.arg else 0 for each in pickletools.opcodes}
"""Bytes of each instruction's argument; below zero if the argument starts with its length."""

LENGTHS: dict[int, Callable[[bytes], int]] = {
    pickletools.TAKEN_FROM_ARGUMENT1: lambda field: field[0],
    pickletools.TAKEN_FROM_ARGUMENT4: lambda field: int.from_bytes(field[:4], "little", signed=True),
    pickletools.TAKEN_FROM_ARGUMENT4U: lambda field: int.from_bytes(field[:4], "little"),
    pickletools.TAKEN_FROM_ARGUMENT8U: lambda field: int.from_bytes(field[:8], "little"),
}
"""How an argument gives its own length, from its first 8 bytes."""

FIELDS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
"""Bytes of that length."""

PUT, LONG_BINPUT, FRAME, GLOBAL, INST, STOP = (ord(code) for code in ("p", "r", "\x95", "c", "i", "."))

DIGITS = 20
"""Digits of the longest number of a stored object."""


def check(data: bytes) -> None:
    """Check what each instruction claims.

    Raises:
        ValueError: it claims more bytes than there are, or a place for an object beyond all that could be stored; or
            there is no such instruction, or no end.
    """
    place, end = 0, len(data)
    while place < end:
        code = data[place]
        size = SIZES.get(code)
        if size is None:
            raise ValueError(f"byte {place} is {code}, which is no instruction of a pickle")
        if code == STOP:
            return
        start = place + 1
        if size >= 0:
            start += size
            claimed = int.from_bytes(data[place + 1 : start], "little")
            if code == FRAME and claimed > end - start:
                raise ValueError(f"at byte {place} a frame claims {claimed} bytes, and {end - start} are left")
            if code == LONG_BINPUT:
                _check_number(claimed, place)
        elif size == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if code in (GLOBAL, INST) else 1):
                start = data.find(b"\n", start) + 1
                if not start:
                    raise ValueError(f"the line at byte {place} has no end")
            if code == PUT:
                line = data[place + 1 : start].strip()
                _check_number(int(line) if len(line) <= DIGITS else end, place)
        else:
            field = data[start : start + 8]
            start += FIELDS[size]
            if start > end:
                raise ValueError(f"the argument at byte {place} is cut")
            length = LENGTHS[size](field)
            if not 0 <= length <= end - start:
                raise ValueError(f"at byte {place} an object claims {length} bytes, and {end - start} are left")
            start += length
        place = start
    raise ValueError("it ends before its last instruction")


def _check_number(number: int, place: int) -> None:
    # Objects are numbered one after the other, and each takes an instruction: so no number is beyond the bytes before.
    if not 0 <= number <= place:
        raise ValueError(f"at byte {place} an object gets the number {number}, beyond all objects before")


class _Ordered(dict[Any, Any]):
    """A dict in place of one that may have attributes, as a module's ``state_dict`` has; they are dropped."""

    def __setstate__(self, state: Any) -> None:
        """Drop the attributes."""


PLAIN = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): _Ordered,
    ("torch", "Size"): tuple,
}
"""What is made as it is, or as its nearest plain value."""

LATIN = ("latin1", "latin-1")
"""Encodings in which pickles of old protocols keep bytes: no longer than their text. Others may double it each time."""


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

    Raises:
        CheckpointError: it is no pickle, or claims more memory than it could fill.
    """
    try:
        return _read(data, _Records)
    except Exception as error:  # a broken pickle makes the machine that reads it raise anything
        raise CheckpointError(f"{what} is damaged: it cannot be read ({type(error).__name__}: {error}).") from error


def read_file(path: PathLike) -> Any:
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


def check_is_archive(path: str | os.PathLike[str]) -> None:
    """Refuse a file that ``torch.save`` did not write. Files of its old releases are bare pickles, and are refused.

    Raises:
        CheckpointError: the file is no archive.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is no checkpoint: neither a folder of Megalight nor a file of torch.save.")


def check_archive(file: str | os.PathLike[str] | IO[bytes]) -> None:
    """Check that an archive of ``torch.save`` does not fill the memory when ``torch.load(weights_only=True)`` opens it.

    Raises:
        ValueError: entries are compressed, which torch never does, or claim more bytes than the archive has; a pickle
            in it is damaged, or asks for memory by a number alone.
        zipfile.BadZipFile: it is no archive.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        packed = sum(info.file_size for info in entries if info.compress_type != zipfile.ZIP_STORED)
        if packed:
            raise ValueError(f"it is compressed, and would be {packed} bytes; torch stores entries as they are")
        for info in entries:
            if info.file_size != info.compress_size:
                raise ValueError(f"{info.filename} claims {info.file_size} bytes, and has {info.compress_size}")
            if info.filename.endswith(".pkl"):
                if info.file_size > MAX_JSON:
                    raise ValueError(f"its pickle has {info.file_size} bytes")
                _read(archive.read(info), _Bounded)


def _read(data: bytes, kind: type[_Records]) -> Any:
    check(data)
    return kind(io.BytesIO(data)).load()


class _Records(pickle.Unpickler):
    record: type[Record] = Record

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._kinds: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in CODES:
            return name
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        # A class for each name, made here: nothing is looked up or imported. Classes are large, so each is made once.
        kind = f"{module}.{name}"
        if kind not in self._kinds:
            self._kinds[kind] = type("Record", (self.record,), {"kind": kind})
        return self._kinds[kind]

    # How `torch.save` refers to the memory of a tensor, which is not needed.
    def persistent_load(self, pid: Any) -> Any:
        return Record(pid)


class _Checked(Record):
    """A record of what torch's unpickler would call: not with the size of new memory."""

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        name = cls.kind.rpartition(".")[2]
        if (name == "bytearray" or name.endswith("Tensor")) and any(isinstance(each, int) for each in arguments):
            raise ValueError(f"it asks for memory: {cls.kind}{arguments}"[:200])
        if name == "encode" and arguments[1:] and arguments[1] not in LATIN:
            raise ValueError(f"it encodes text as {str(arguments[1])[:40]!r}")
        return super().__new__(cls, *arguments, **named)


class _Bounded(_Records):
    record = _Checked
