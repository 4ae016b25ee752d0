"""Addresses in object stores (``s3://``, ``gs://``, ``memory://``, ...), through fsspec: what ``Path`` is to a disk.

An :class:`Address` names an object or a folder of objects, and reads, writes and lists it. Every failure of a store is
a :class:`~megalight.errors.StorageError` that names the address. No torch in here. fsspec is imported at the first use:
its import takes longer than that of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megalight.errors import CheckpointError, StorageError

PART = 16 << 20
"""Bytes of one part of an upload. S3 takes 10,000 parts per object at most."""


@dataclass(frozen=True, order=True)
class Address:
    """An object, or a folder of objects, in a store.

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
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
        return f".{self.name.rpartition('.')[2]}" if "." in self.name else ""

    @property
    def parent(self) -> Address:
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
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
            return _url_to_fs(self.url, use_listings_cache=False)
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
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
        return self._kind is not None

    def is_file(self) -> bool:
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
        return self._kind == "file"

    def is_dir(self) -> bool:
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
        return self._kind == "directory"

    @property
    def _kind(self) -> str | None:
        # Not by `exists` of fsspec, which may take any error for a file that is not there.
        try:
            return str(self.ask("info")["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_symlink(self) -> bool:
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
        return False

    def iterdir(self) -> Iterator[Address]:
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
        # Some stores list the folder itself, too; a folder in it may have the same name.
        keys = {str(key).strip("/") for key in self.ask("ls", detail=False)} - {self.key.strip("/")}
        yield from (self / name for name in sorted(key.rpartition("/")[2] for key in keys) if name)

    def read_bytes(self) -> bytes:
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
        return bytes(self.ask("cat_file"))

    def resolve(self) -> Address:
        """See :class:`~megalight.checkpoint.disk.files.PathLike`."""
        return self

    def stat(self) -> Status:
        """Its size in bytes, and when it was written."""
        return Status(int(self.ask("info").get("size") or 0), self)

    @contextmanager
    def upload(self) -> Iterator[Callable[[bytes | memoryview], None]]:
        """Write the object. It appears as a whole, at the end of the context; after an error it does not."""
        file = self.store.open(self.key, "wb", block_size=PART)
        try:
            yield file.write
        except BaseException:
            file.discard()
            with suppress(AttributeError):
                file.closed = True  # or the end of the object would send what there is
            raise
        file.close()

    def sizes(self) -> dict[str, int]:
        """Bytes of every object in the folder, by relative name. One listing."""
        prefix = len(self.key) + 1
        return {name[prefix:]: info["size"] for name, info in self.ask("find", detail=True).items()}

    def forget_listings(self) -> None:
        """Drop what other users of this store in the process, such as Lightning's callbacks, have listed."""
        _url_to_fs(self.url)[0].invalidate_cache()

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


class ObjectReader:
    """An object, read by ranges."""

    def __init__(self, path: Address) -> None:
        self._path = path
        self._size = int(path.ask("size"))

    def size(self) -> int:
        """See :class:`~megalight.checkpoint.disk.datafile.DataFileReader`."""
        return self._size

    def into(self, memory: memoryview, start: int) -> int:
        """See :class:`~megalight.checkpoint.disk.datafile.DataFileReader`."""
        stop = min(start + len(memory), self._size)
        if stop <= start:
            return 0
        data = self._path.ask("cat_file", start=start, end=stop)
        memory[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """See :class:`~megalight.checkpoint.disk.datafile.DataFileReader`."""


def _url_to_fs(url: str, **options: Any) -> tuple[Any, str]:
    """Return the store of an address, and the key in it."""
    found: tuple[Any, str] = import_module("fsspec.core").url_to_fs(url, **options)
    return found
