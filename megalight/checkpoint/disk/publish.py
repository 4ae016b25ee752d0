"""The life of a checkpoint folder: begun beside its final place, published by one rename, removed by another.

``<path>.partial-<token>`` is being written, ``<path>.old-<token>`` was replaced, ``<path>.removed-<token>`` is being
deleted, or will be when nobody reads it any more. A process holds a lock on the folder that it works in, and the
operating system drops the lock when the process dies. So a folder without a lock is a leftover, and one with a lock is
a save under way. On some file systems a lock is not seen by other machines: tokens begin with the machine, so that
nobody takes the folder of another for a leftover.
No torch in here.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import singledispatch
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk.files import PathLike, sync_directory
from megalight.errors import CheckpointError

_TEMPORARY = re.compile(r"(?P<path>.+)\.(?P<state>partial|old|removed)-(?P<machine>[0-9a-f]{8})[0-9a-f]{8}")
ATTEMPTS = 100
"""How often a reader asks for a lock, in steps of 10 ms."""

ABANDONED_SECONDS = 24 * 3600.0
"""What another machine has not touched for so long, by the clock of the storage, is a leftover."""


def machine() -> str:
    """Return what is the same for all processes that see each other's locks on any file system: a name of this boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="utf-8").strip() if boot.exists() else platform.node()


def place(path: str | os.PathLike[str]) -> PathLike:
    """Where a path, or an address of remote storage such as ``s3://bucket/run``, leads.

    Raises:
        CheckpointError: it is a chain of file systems, such as ``simplecache::s3://bucket/run``.
    """
    text = os.fspath(path)
    # Addresses have a protocol of at least two letters. One letter is a drive.
    protocol, found, rest = text.partition("://")
    if found and "::" in protocol:
        raise CheckpointError(
            f"{text} leads through {protocol.rpartition('::')[0]}, a copy on this machine that other ranks do not see. "
            f"Give the store itself: {protocol.rpartition('::')[2]}://{rest}"
        )
    if not found or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", protocol):
        return Path(path)
    if protocol in ("file", "local"):
        return Path(rest)
    # fsspec is imported when it is needed; the import also registers what remote storage does in its own way
    address: PathLike = import_module("megalight.checkpoint.disk.remote").Address(f"{protocol}://{rest.rstrip('/')}")
    return address


def absolute(path: str | os.PathLike[str]) -> PathLike:
    """The same, whatever the current folder is later."""
    found = place(path)
    return Path(os.path.abspath(found)) if isinstance(found, Path) else found


def check_new(path: PathLike) -> None:
    """Check that a command can write a new folder, as far as this can be known before.

    A save of a run replaces the checkpoint of the same name. A command must not: the name may be a slip, and any folder
    of the user would be gone.

    Raises:
        CheckpointError: something is there already, or the folder above cannot be written.
        StorageError: its storage does not answer.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is there already; remove it, or name another folder.")
    if isinstance(path, Path):
        # The nearest folder that is there: those below it are made.
        above = next(each for each in Path(os.path.abspath(path)).parents if each.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise CheckpointError(f"{path} cannot be written: {above} is not a folder where this user may write.")


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a finished checkpoint with all its files, judged by names and sizes.

    Raises:
        StorageError, OSError: its storage does not answer.
    """
    return _complete(resolve(path)) is not None


def _complete(root: Any) -> manifests.Manifest | None:
    """The manifest of a folder with all its files. Read once, as another process may remove the folder meanwhile."""
    try:
        manifest = manifests.read(root)
        manifests.check_files(root, manifest)
    # Removed meanwhile, or of others. A disk that fails is neither: a run must not start from scratch for it.
    except (CheckpointError, FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return manifest


def resolve(path: str | os.PathLike[str]) -> PathLike:
    """Where the checkpoint of this name is."""
    found: PathLike = actual(place(path))
    return found


@singledispatch
def actual(path: Any) -> Any:
    """Where the checkpoint of this name is.

    At ``path``; or, when a save was killed between sealing its folder and renaming it (or between the two renames of a
    replacement, on file systems that cannot swap), under the temporary name it still has.
    """
    if path.exists():
        return path
    # "partial" first: it is newer than what it was to replace.
    for state in ("partial", "old"):
        for candidate in sorted(path.parent.glob(f"{_escaped(path.name)}.{state}-*")):
            if _TEMPORARY.fullmatch(candidate.name) and is_complete(candidate) and not _saving(candidate):
                return candidate
    return path


def _saving(folder: Path) -> bool:
    """Whether a living save holds a folder. It renames it next, under the hands of who reads it by this name."""
    try:
        lock = locked(folder, fcntl.LOCK_SH)
    except (BlockingIOError, FileNotFoundError):
        return True
    if lock is not None:
        os.close(lock)
    return False


def finished(directory: str | os.PathLike[str]) -> list[PathLike]:
    """All finished checkpoints in a directory, oldest first."""
    found: dict[PathLike, int] = {}
    for path in named(place(directory)):
        manifest = None if path in found else _complete(resolve(path))
        if manifest is not None:
            found[path] = manifest.saved_at
    return sorted(found, key=lambda path: (found[path], path))


@singledispatch
def named(directory: Any) -> Iterator[Any]:
    """The names that checkpoints in a directory may go by, one or more times each."""
    for entry in _entries(directory):
        match = _TEMPORARY.fullmatch(entry.name)
        yield entry.with_name(match["path"]) if match else entry


def latest(directory: str | os.PathLike[str]) -> PathLike | None:
    """The newest finished checkpoint in a directory, or None. What a killed save left does not count."""
    return next(reversed(finished(directory)), None)


def remove(path: str | os.PathLike[str]) -> bool:
    """Remove a checkpoint: gone at once under its name, then deleted. Nothing happens when it is not there.

    Returns:
        False if somebody reads it: then it stays.
    """
    gone: bool = removed(place(path))
    return gone


@singledispatch
def removed(path: Any) -> bool:
    """See :func:`remove`."""
    while True:
        root = actual(path)
        try:
            lock = locked(root)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            return True
        try:
            if _taken(root, path, lock):
                return True
        finally:
            if lock is not None:
                os.close(lock)


def _taken(root: Path, path: Path, lock: int | None) -> bool:
    """Delete a folder that is locked; False if another run has put a new one in its place meanwhile, which stays.

    The readers of the new one hold that one, and a lock says nothing about them. So the folder gets another name first:
    what has it is either the one with the lock, or goes back. Until then it is found under this name by who asks for
    the checkpoint, and stays if this process is killed.
    """
    aside, trash = _temporary(path, "old"), _temporary(path, "removed")
    try:
        os.rename(root, aside)
        if lock is None or os.path.samestat(os.fstat(lock), os.stat(aside)):
            # Renamed before it is deleted: at every moment there is a whole checkpoint of this name, or none.
            os.rename(aside, trash)
            # The rename reaches the disk before anything is deleted.
            sync_directory(path.parent)
            delete(trash)
            return True
    except FileNotFoundError:
        return True
    try:
        os.rename(aside, root)
    except OSError:
        # A still newer one has come: this one is what it has replaced, unless its save has deleted it already.
        with suppress(FileNotFoundError):
            _dispose(aside, path)
    return False


@singledispatch
def changed(path: Any) -> None:
    """Let other readers in this process see that a checkpoint was written or removed."""


@singledispatch
def reading(root: Any) -> int | None:
    """Open a checkpoint's folder and lock it for reading: nobody deletes it until the returned descriptor is closed.

    Returns:
        None where it is being removed: then reading fails with its own message. A descriptor without a lock where the
        file system has none.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            descriptor = os.open(root, os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Replaced before the lock was there, it may be half deleted.
            done = os.path.samestat(os.fstat(descriptor), os.stat(root))
        except (BlockingIOError, FileNotFoundError):
            done = False  # the save that has just published it lets go next
        except OSError:
            done = True
        if done or not left:
            break
        os.close(descriptor)
        time.sleep(0.01)
    return descriptor


class Partial:
    """A checkpoint folder while it is being written. Made by one process for all; ``discard`` or ``publish`` it."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} exists and is not a folder. Save elsewhere, or remove it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under the same directory, so that publishing is a rename inside one file system.
        clean(path)
        self.path = path
        self.folder = _temporary(path, "partial")
        self.folder.mkdir()
        self._lock = locked(self.folder)

    def publish(self) -> None:
        """Put the sealed folder in its place. A checkpoint that was there stays until this one is."""
        publish(self.folder, self.path)
        self.release()

    def discard(self) -> None:
        """Delete it; the published checkpoint of the same name, if any, is untouched."""
        delete(self.folder)
        self.release()

    def release(self) -> None:
        """Give up the lock: the folder is published, or gone."""
        if self._lock is not None:
            # closing is not enough: workers of a data loader, forked while the save went on, have the descriptor too
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None


class Unfinished(Protocol):
    """A checkpoint while it is being written, as :class:`Partial` is one."""

    @property
    def folder(self) -> Any:
        """Where it is written."""

    def publish(self) -> None:
        """Put the sealed folder in its place."""

    def discard(self) -> None:
        """Delete it."""

    def release(self) -> None:
        """Let others take it for what it is: published, or a leftover."""


@singledispatch
def begin(path: Any) -> Unfinished:
    """Begin to write a checkpoint, in one process for all."""
    return Partial(path)


@singledispatch
def begin_folder(path: Any) -> Unfinished:
    """Begin to write a folder for others to read, which has no manifest."""
    return Partial(path)


@singledispatch
def publish(folder: Any, path: Any) -> None:
    """Put a sealed folder in its place. A checkpoint that was there stays until this one is."""
    # The contents are on disk before the name is.
    sync_directory(folder)
    if not os.path.lexists(path):
        os.rename(folder, path)
        sync_directory(path.parent)
    elif _swap(folder, path):
        sync_directory(path.parent)
        _dispose(folder, path)
    else:
        old = _temporary(path, "old")
        # For a moment there is none of this name. `resolve` then finds it under its old one.
        os.rename(path, old)
        try:
            os.rename(folder, path)
        except OSError:
            os.rename(old, path)
            raise
        sync_directory(path.parent)
        _dispose(old, path)


def _dispose(folder: Path, path: Path) -> None:
    """Delete what was replaced at ``path``, or leave it to a later :func:`clean` if somebody reads it."""
    try:
        lock = locked(folder)
    except BlockingIOError:
        # Under its present name it would be taken for the checkpoint, once that one is removed.
        os.rename(folder, _temporary(path, "removed"))
        return
    delete(folder)
    if lock is not None:
        os.close(lock)


def clean(path: Path) -> None:
    """Delete what killed saves and removals left in the directory of ``path``.

    A folder that a living process has locked stays. Where locks say nothing (the file system has none, or another
    machine works in the folder), only leftovers of ``path`` itself go, and those that nobody has touched for a day.
    A complete leftover stays as long as its path is missing: it *is* that checkpoint.
    """
    for entry in _entries(path.parent):
        match = _TEMPORARY.fullmatch(entry.name)
        # A complete leftover whose path is missing is that checkpoint, and stays.
        if match is None or actual(entry.with_name(match["path"])) == entry:
            continue
        try:
            descriptor = locked(entry)
        except (BlockingIOError, FileNotFoundError):
            continue
        told = descriptor is not None and match["machine"] == _token()
        if told or match["path"] == path.name or _abandoned(entry):
            delete(entry)
        if descriptor is not None:
            os.close(descriptor)


def _entries(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from sorted(entry for entry in directory.iterdir() if entry.is_dir())


def _temporary(path: Path, state: str) -> Path:
    return path.with_name(f"{path.name}.{state}-{_token()}{secrets.token_hex(4)}")


def _token() -> str:
    return hashlib.blake2b(machine().encode(), digest_size=4).hexdigest()


def _abandoned(folder: Path) -> bool:
    """Whether nobody has written in a folder for long."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder.parent) as file:
        # the storage stamps both: clocks of machines differ
        now = os.fstat(file.fileno()).st_mtime
        newest = max(entry.lstat().st_mtime for entry in (folder, *folder.rglob("*")))
        return now - newest > ABANDONED_SECONDS
    return False


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


@singledispatch
def delete(folder: Any) -> None:
    """Delete a folder with all that is in it, as far as that is possible."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def locked(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Lock a folder or file until the returned descriptor is closed; None where its file system cannot.

    Raises:
        BlockingIOError: a living process has it.
    """
    # Read-only: a lock needs no right to write.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _swap(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that neither name is ever missing; False where the system cannot."""
    if sys.platform != "linux":
        return False
    # `renameat2` has no function in Python.
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return exchange is not None and exchange(here, os.fsencode(one), here, os.fsencode(other), flag) == 0
