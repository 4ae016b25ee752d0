"""Checkpoints in remote storage (``s3://``, ``gs://``, ``memory://``, ...), through fsspec. No torch in here.

An address imports this package, also when another process unpickles it, and so registers all that differs for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from megalight.checkpoint.disk import datafile, files, publish
from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk.files import Write
from megalight.checkpoint.disk.manifest import Manifest
from megalight.errors import CheckpointError, StorageError

# A place in remote storage, and how files in it are written, read and listed.


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


# The life of a checkpoint in remote storage: what :mod:`megalight.checkpoint.disk.publish` does, for an address.
#
# A store of objects has no rename and no locks, but an object appears as a whole. So each save of ``<path>`` writes
# into a folder of its own, ``<path>/save-<token>``, and its manifest, written last, publishes it. The checkpoint is
# the newest such folder with a manifest. One without is a save under way, or a leftover: the token names the process
# that writes it, and other machines judge by its age. When a save is published, the folders before it are deleted.


log = logging.getLogger(__name__)

_TOKEN = "save-"

_UNDER_WAY: set[str] = set()
"""Saves that this process is writing."""


@publish.actual.register
def _actual(path: Address) -> Address:
    """The newest save of this path that is published; the path itself where a folder was copied there by hand."""
    return _newest(path, [save for save in (path, *_saves(path)) if _sealed(save)])


def _newest(path: Address, sealed: list[Address]) -> Address:
    # The manifest of a single one need not be read.
    return max(sealed, key=_order, default=path) if len(sealed) != 1 else sealed[0]


@publish.named.register
def _named(directory: Address) -> Iterator[Address]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from (each for each in directory.iterdir() if each.is_dir())


@publish.changed.register
def _changed(path: Address) -> None:
    """Lightning's callbacks ask a store of their own, which keeps listings."""
    url_to_fs(path.url)[0].invalidate_cache()


@publish.reading.register
def _reading(root: Address) -> None:
    """A store has no locks: who reads a checkpoint that is removed gets an error, and never wrong values."""


@publish.removed.register
def _removed(path: Address) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        # One by one, never the whole: another run may be writing a save of this path, or begin to.
        for part in sorted(path.iterdir(), key=lambda part: part.name != manifests.NAME):
            if not part.name.startswith(_TOKEN) or _sealed(part) or _left(part):
                _delete(part)
    # Some stores have folders of their own, which stay when they are empty.
    with suppress(OSError):
        path.store.rmdir(path.key)
    return True


@publish.publish.register
def _publish(folder: Address, path: Address) -> None:
    """The manifest has published it; what was there before goes."""
    with _left_for_later(path):
        own = _order(folder)
        for save in _saves(path):
            # Older ones alone. Two runs may save the same path at once: each would delete what the other has published,
            # or is writing.
            if (0, "") <= _order(save) < own:
                _delete(save)
        # A checkpoint that was copied there by hand lies in the path itself.
        if _sealed(path) and _order(path) < own:
            _delete_copied(path)


def _delete_copied(path: Address) -> None:
    """Delete the files of a checkpoint that lies in ``path`` itself, and nothing else: saves lie beside them.

    The manifest goes last, so that the next save ends a deletion that was cut short.
    """
    listed = manifests.read(path).files
    for name in (*listed, manifests.NAME):
        with suppress(FileNotFoundError):
            path.store.rm_file((path / name).key)
    # Stores that have folders keep empty ones. One with other files stays.
    folders = {"/".join(name.split("/")[:depth]) for name in listed for depth in range(1, name.count("/") + 1)}
    for name in sorted(folders, reverse=True):
        with suppress(OSError):
            path.store.rmdir((path / name).key)


class RemotePartial:
    """A save that is being written; see :class:`~megalight.checkpoint.disk.publish.Partial`."""

    def __init__(self, path: Address) -> None:
        if path.is_file():
            raise CheckpointError(f"{path} exists and is not a folder. Save elsewhere, or remove it.")
        _clean(path)
        self.path = path
        self.folder = path / f"{_TOKEN}{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
        _UNDER_WAY.add(self.folder.url)

    def publish(self) -> None:
        """Remove what was there before."""
        _publish(self.folder, self.path)
        self.release()

    def discard(self) -> None:
        """Delete it, unless it is published; the checkpoint of the same name, if any, is untouched."""
        # First: should the deletion fail, the next save of this process deletes it.
        self.release()
        with _left_for_later(self.folder):
            # What it replaced may be gone already: then it is the only one.
            if not _sealed(self.folder):
                _delete(self.folder)

    def release(self) -> None:
        """Let this process take it for what it is: published, or a leftover."""
        _UNDER_WAY.discard(self.folder.url)


publish.begin.register(Address, RemotePartial)


class RemoteFolder:
    """A folder for others, which is written in its place: nobody takes it for whole before its last file is there."""

    def __init__(self, path: Address) -> None:
        if path.exists():
            raise CheckpointError(f"{path} is there already, and a store has no rename to replace it by; remove it.")
        self.folder = path

    def publish(self) -> None:
        """Nothing to do: its last file has published it."""

    def discard(self) -> None:
        """Delete what was written."""
        with _left_for_later(self.folder):
            _delete(self.folder)

    def release(self) -> None:
        """Nothing to release."""


publish.begin_folder.register(Address, RemoteFolder)


@contextmanager
def _left_for_later(place: Address) -> Iterator[None]:
    """A deletion that fails does not fail a save: the next save of this path deletes what is left."""
    try:
        yield
    except Exception as error:  # packages of stores have errors of their own
        log.warning("leftovers in %s are not deleted yet: %r", place, error)


def _sealed(save: Address) -> bool:
    """Whether a save has its manifest."""
    with suppress(FileNotFoundError, NotADirectoryError):
        # A listing also distinguishes a folder from a file of this name.
        return any(each.name == manifests.NAME for each in save.iterdir())
    return False


def _saves(path: Address) -> list[Address]:
    try:
        return [each for each in path.iterdir() if each.name.startswith(_TOKEN)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _order(save: Address) -> tuple[int, str]:
    """Sorts saves by age; an unpublished one is the oldest."""
    try:
        return manifests.read(save).saved_at, save.url
    except (CheckpointError, FileNotFoundError):  # torn, or another process has just deleted it
        return -1, save.url


def _clean(path: Address) -> None:
    """Delete leftovers: of this path, and those beside it whose writer is dead or has not written for a day.

    Also what a killed removal left: its manifest is gone, so nobody reads it.
    """
    saves = _saves(path)
    # Each is asked once, and before: another run may publish its save and end at any moment.
    dead = {save for save in saves if _dead(save)}
    sealed = [save for save in (path, *saves) if _sealed(save)]
    current = _newest(path, sealed)
    for save in saves:
        # A sealed one was replaced, and its deletion was cut short. Another run may be writing one that is not.
        if save != current and (save in sealed or save in dead or _abandoned(save)):
            _delete(save)
    for other in _named(path.parent):
        for save in _saves(other) if other != path else []:
            if _left(save):
                _delete(save)


def _left(save: Address) -> bool:
    """Whether a save is a leftover: it is not published, and nobody is writing it."""
    # Asked first: a process may publish its save and end between the two questions.
    dead = _dead(save)
    return not _sealed(save) and (dead or _abandoned(save))


def _machine() -> str:
    """A name for all processes that see each other's ids: containers of one machine do not."""
    space = Path("/proc/self/ns/pid")
    seen = f"{publish.machine()} {os.readlink(space) if space.exists() else ''}"
    return hashlib.blake2b(seen.encode(), digest_size=4).hexdigest()


def _dead(save: Address) -> bool:
    """Whether the process that was writing a save has ended, as far as this one can know."""
    machine, _, rest = save.name.removeprefix(_TOKEN).partition("-")
    process = rest.partition("-")[0]
    if machine != _machine() or not process.isdecimal():
        return False
    if int(process) == os.getpid():
        return save.url not in _UNDER_WAY
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, and belongs to somebody else
        pass
    return False


def _abandoned(folder: Address) -> bool:
    """Whether nobody has written to a folder for long."""
    now = time.time()
    try:
        found = folder.ask("find")
        # One young file is enough: a question for each file of each save under way would slow every other save.
        old = (now - folder.ask("modified", key).timestamp() > publish.ABANDONED_SECONDS for key in found)
        return bool(found) and all(old)
    except FileNotFoundError:  # another process is deleting it
        return False


@publish.delete.register
def _delete(folder: Address) -> None:
    store = folder.store
    # the manifest first: a deletion that is cut short must leave no checkpoint with holes
    with suppress(FileNotFoundError):
        store.rm_file((folder / manifests.NAME).key)
    with suppress(FileNotFoundError):
        if not has_magic(folder.key):
            store.rm(folder.key, recursive=True)
            return
        # `rm` takes the name for a pattern: run[1] would be run1, with all that is in it
        for key in folder.ask("find"):
            store.rm_file(key)
