"""Files of tensors, read in parts, and verified where their checksums are known. No torch in here.

:class:`DataFile` is a data file of a checkpoint, :class:`OpenFile` any other file of tensors. :class:`Pinned` is the
path of an open folder, which is read to its end even if a save renames it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PosixPath
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from megalight.checkpoint.disk.address import Address, ObjectReader
from megalight.checkpoint.disk.files import (
    BLOCK,
    MAX_HEADER,
    REMOVED,
    TORCH_SUFFIX,
    FileRecord,
    PathLike,
    checksum,
    located,
)
from megalight.errors import CheckpointError


class DataFileReader(Protocol):
    """An open file."""

    def size(self) -> int:
        """Bytes that it has."""

    def into(self, memory: memoryview, start: int) -> int:
        """Fill memory from byte ``start`` on, as far as the file goes. Return how many bytes were read at once."""

    def close(self) -> None:
        """Give it up."""


class LocalReader:
    """A file of this machine. Reads by ``pread``, so that a bad disk is an error and not a signal."""

    def __init__(self, path: Any) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)

    def size(self) -> int:
        """See :class:`DataFileReader`."""
        return os.fstat(self._descriptor).st_size

    def into(self, memory: memoryview, start: int) -> int:
        """See :class:`DataFileReader`."""
        return os.preadv(self._descriptor, [memory], start)

    def close(self) -> None:
        """See :class:`DataFileReader`."""
        os.close(self._descriptor)


def opened(path: PathLike) -> DataFileReader:
    """Open a file for reading."""
    return ObjectReader(path) if isinstance(path, Address) else LocalReader(path)


class OpenFile:
    """An open file.

    Attributes:
        buffer: scratch memory of one block; given, or its own.
        count: bytes that were read.
    """

    def __init__(self, path: PathLike, what: str, buffer: NDArray[np.uint8] | None = None) -> None:
        self.path = path
        self.what = what
        self.buffer = np.empty(BLOCK, np.uint8) if buffer is None else buffer
        self.count = 0

    def __enter__(self) -> Self:
        try:
            self._reader = opened(self.path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.what} is missing; {REMOVED}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read(self, start: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``start`` on.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        position = 0
        while position < len(into):
            try:
                # It may read less than was asked for.
                count = self._reader.into(into[position:], start + position)
            except FileNotFoundError as error:  # of a store, which finds an object for each question
                raise CheckpointError(f"{self.what} is missing; {REMOVED}") from error
            except OSError as error:
                raise CheckpointError(f"{self.what} cannot be read: {error}.") from error
            # The end of the file: asking again would never end.
            if not count:
                raise CheckpointError(f"{self.what} is torn: it ends at byte {start + position}, inside a tensor.")
            position += count
        self.count += position


class DataFile(OpenFile):
    """A data file of a checkpoint, which can be verified."""

    def __init__(
        self,
        directory: PathLike,
        name: str,
        records: Mapping[str, FileRecord],
        buffer: NDArray[np.uint8] | None = None,
    ) -> None:
        if name not in records:
            raise CheckpointError(f"checkpoint {directory} is torn: its manifest does not list {name}.")
        super().__init__(located(directory, name), f"{name} in checkpoint {directory}", buffer)
        self.record = records[name]

    def verify(self, places: Iterable[tuple[int, int, str]]) -> None:
        """Check size, header and the given ``(start, stop, checksum)`` blocks.

        Raises:
            CheckpointError: anything differs, or cannot be read.
        """
        size = self._reader.size()
        if size != self.record.size:
            raise CheckpointError(f"{self.what} is torn: {size} bytes, {self.record.size} were saved.")
        # Torch's archives have no header of ours; `verify_around` checks what surrounds their tensors.
        if self.path.suffix != TORCH_SUFFIX:
            self._verify_header(size)
        self.verify_blocks(places)

    def verify_blocks(self, places: Iterable[tuple[int, int, str]]) -> None:
        """Check ``(start, stop, checksum)`` blocks.

        Raises:
            CheckpointError: one differs, or cannot be read.
        """
        for place in places:
            self.block(*place)

    def block(self, start: int, stop: int, digest: str) -> memoryview:
        """Bytes ``[start, stop)`` of the file, verified; good until the next read.

        Raises:
            CheckpointError: they differ from what was saved, or cannot be read.
        """
        # The same memory for each block: the largest part of a file is never held at once.
        data = self.buffer.data[: stop - start]
        self.read(start, data)
        if checksum(data) != digest:
            raise CheckpointError(f"{self.what} is torn: bytes {start} to {stop} differ from what was saved.")
        return data

    def verify_around(self, tensors: Iterable[tuple[int, int]]) -> None:
        """Check the bytes of a file of torch's archives that belong to none of its ``(start, stop)`` tensors.

        Raises:
            CheckpointError: they differ from what was saved, or cannot be read.
        """
        around, position = b"", 0
        # A last interval at the end of the file, to take what is behind the last tensor.
        for start, stop in (*sorted(tensors), (self.record.size, 0)):
            around += self._bytes(start - position, position)
            position = stop
        if checksum(around) != self.record.checksum:
            raise CheckpointError(f"{self.what} is torn: what is around its tensors differs from what was saved.")

    def _verify_header(self, size: int) -> None:
        length = int.from_bytes(self._bytes(8), "little") if size >= 8 else MAX_HEADER + 1
        # The length is a claim of the file, so it is compared before as many bytes are read.
        if length > min(MAX_HEADER, size - 8) or checksum(self._bytes(8 + length)) != self.record.checksum:
            raise CheckpointError(f"{self.what} is torn: its header differs from what was saved.")

    def _bytes(self, length: int, start: int = 0) -> bytes:
        data = bytearray(length)
        self.read(start, memoryview(data))
        return bytes(data)


DESCRIPTORS = Path("/proc/self/fd")
"""Where Linux shows the open files of this process."""


class Pinned(PosixPath):
    """The path of an open folder, and of what is in it: files are opened in that folder, even if it was renamed.

    It prints as the name that the folder had.
    """

    _folder: str | None = None

    @classmethod
    def folder(cls, path: Path, descriptor: int) -> Path:
        """Return the folder of an open descriptor; ``path`` itself where the system does not show descriptors."""
        shown = DESCRIPTORS / str(descriptor)
        return cls(path)._inside(str(shown)) if shown.exists() else path

    def __fspath__(self) -> str:
        return str(self) if self._folder is None else self._folder

    def __truediv__(self, name: str | os.PathLike[str]) -> Self:
        found = super().__truediv__(name)
        return found if self._folder is None else found._inside(f"{self._folder}/{os.fspath(name)}")

    def _inside(self, folder: str) -> Self:
        self._folder = folder
        return self
