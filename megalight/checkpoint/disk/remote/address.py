"""A place in remote storage, and how files in it are written, read and listed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from megalight.checkpoint.disk import datafile, files
from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk.files import Write
from megalight.checkpoint.disk.manifest import Manifest
from megalight.errors import CheckpointError, StorageError

PART = 16 << 20
"""Bytes that are sent at a time. S3 takes 10,000 parts of a file at most."""


@dataclass(frozen=True, order=True)
class Address:
    """A place in remote storage.

    Attributes:
        url: with its protocol. Only the root of a store (``memory://``) ends with a slash.

    Raises:
        CheckpointError: there is no such protocol, or the package for it is not installed (at the first use).
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.url}{name}" if self.url.endswith("://") else f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        return f".{self.name.rpartition('.')[2]}" if "." in self.name else ""

    @property
    def parent(self) -> Address:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        # Above a bucket are those of others: like the root of a disk, it is its own parent.
        above, _, name = self.url.rpartition("/")
        return self if above.endswith("/") or not name else Address(above)

    @property
    def store(self) -> Any:
        """The store. It keeps no listings: other processes write to it too."""
        return self._found[0]

    @property
    def key(self) -> str:
        """What the store calls this place."""
        return str(self._found[1])

    @property
    def _found(self) -> tuple[Any, str]:
        try:
            # fsspec keeps one store per protocol and options; credentials come from the environment
            return url_to_fs(self.url, use_listings_cache=False)  # type: ignore[no-any-return]
        except (ImportError, ValueError) as error:  # no such protocol, or no package for it
            raise CheckpointError(
                f"{self.url} cannot be reached: {error}. Checkpoints may be in stores of objects that fsspec "
                "reaches: install the package of the protocol (s3fs for s3://, gcsfs for gs://)."
            ) from error

    def ask(self, question: str, key: str | None = None, **options: Any) -> Any:
        """Ask the store about this place, or about another key.

        Raises:
            FileNotFoundError, NotADirectoryError: there is nothing.
            StorageError: the store does not answer, or refuses.
        """
        try:
            return getattr(self.store, question)(self.key if key is None else key, **options)
        except (FileNotFoundError, NotADirectoryError, CheckpointError):
            raise
        except Exception as error:  # packages of stores have errors of their own
            raise StorageError(
                f"{self.url} cannot be read: {type(error).__name__}: {error}. Check the address, the network and the "
                "credentials."
            ) from error

    def exists(self) -> bool:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        return self._kind is not None

    def is_file(self) -> bool:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        return self._kind == "file"

    def is_dir(self) -> bool:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        return self._kind == "directory"

    @property
    def _kind(self) -> str | None:
        # Not by `exists` of fsspec, which may take any error for a file that is not there.
        try:
            return str(self.ask("info")["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_symlink(self) -> bool:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        return False

    def iterdir(self) -> Iterator[Address]:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        # Some stores list the folder itself, too; a folder in it may have the same name.
        keys = {str(key).strip("/") for key in self.ask("ls", detail=False)} - {self.key.strip("/")}
        yield from (self / name for name in sorted(key.rpartition("/")[2] for key in keys) if name)

    def read_bytes(self) -> bytes:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        return bytes(self.ask("cat_file"))

    def resolve(self) -> Address:
        """See :class:`~megalight.checkpoint.disk.files.Place`."""
        return self

    def stat(self) -> Status:
        """Its size in bytes, and when it was written."""
        return Status(int(self.ask("info").get("size") or 0), self)

    @property
    def modified(self) -> float:
        """When it was written, in seconds since 1970."""
        return float(self.ask("modified").timestamp())


@dataclass(frozen=True)
class Status:
    """What is asked of a file: its size, and when it was written."""

    st_size: int
    file: Address

    @property
    def st_mtime_ns(self) -> int:
        """When it was written, in nanoseconds since 1970. Another question to the store."""
        return int(self.file.modified * 1e9)


@files.located.register
def _located(root: Address, name: str) -> Address:
    """Sends no request: a store has no links, and reading a missing file raises an error."""
    return root / files.checked_name(name)


@files.created.register
@contextmanager
def _created(path: Address) -> Iterator[Write]:
    file = path.store.open(path.key, "wb", block_size=PART)
    try:
        yield file.write
    except BaseException:
        file.discard()
        with suppress(AttributeError):
            file.closed = True  # or the end of the object would send what there is
        raise
    file.close()


@files.sync_directory.register
def _sync_directory(path: Address) -> None:
    """Nothing to do: an object is safe when it has been sent."""


class RemoteReader:
    """A file in a store, read by ranges."""

    def __init__(self, path: Address) -> None:
        self._path = path
        self._size = int(path.ask("size"))

    def size(self) -> int:
        """See :class:`~megalight.checkpoint.disk.datafile.Reader`."""
        return self._size

    def into(self, memory: memoryview, start: int) -> int:
        """See :class:`~megalight.checkpoint.disk.datafile.Reader`."""
        stop = min(start + len(memory), self._size)
        if stop <= start:
            return 0
        data = self._path.ask("cat_file", start=start, end=stop)
        memory[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """See :class:`~megalight.checkpoint.disk.datafile.Reader`."""


datafile.opened.register(Address, RemoteReader)


@manifests.check_files.register
def _check_files(root: Address, manifest: Manifest) -> None:
    """One listing in place of a question per file."""
    prefix = len(root.key) + 1
    found = {name[prefix:]: info["size"] for name, info in root.ask("find", detail=True).items()}
    for name, record in manifest.files.items():
        if name not in found:
            raise CheckpointError(f"checkpoint {root} is torn: {name} is missing.")
        if found[name] != record.size:
            raise CheckpointError(
                f"checkpoint {root} is torn: {name} has {found[name]} bytes, {record.size} were saved."
            )
