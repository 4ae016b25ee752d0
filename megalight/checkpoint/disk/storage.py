"""Storage: how a local disk keeps the states of a checkpoint folder, and what an object store must do as well.

:mod:`megalight.checkpoint.disk.publish` tells the life of a checkpoint and calls a :class:`Storage` for each step.
:class:`LocalDisk` does them by renames and locks:

- ``<path>.partial-<token>`` is being written; one rename publishes it as ``<path>``.
- ``<path>.old-<token>`` was replaced, for a moment.
- ``<path>.removed-<token>`` is being deleted, or will be when nobody reads it any more.

A process locks the folder that it works in (``flock``), and the operating system drops the lock when the process dies.
So a folder without a lock is a leftover, and one with a lock is a save in progress. On some file systems other machines
do not see a lock: tokens start with the machine, so that nobody takes the folder of another machine for a leftover.
:class:`~megalight.checkpoint.disk.object_store.ObjectStore` has neither renames nor locks. No torch in here.
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk.files import sync_directory

ATTEMPTS = 100
"""How often a reader asks for a lock, in steps of 10 ms."""

ABANDONED_SECONDS = 24 * 3600.0
"""What another machine has not touched for this long, by the clock of the storage, is a leftover."""

_TEMPORARY = re.compile(r"(?P<path>.+)\.(?P<state>partial|old|removed)-(?P<machine>[0-9a-f]{8})[0-9a-f]{8}")


class Storage(Protocol):
    """The steps of a checkpoint folder that depend on where it is. ``path`` is the name of the checkpoint."""

    def begin(self, path: Any) -> tuple[Any, Callable[[], None]]:
        """Make and hold the folder of a new save. Return it, and what gives up the hold."""

    def publish(self, folder: Any, path: Any) -> None:
        """Make a sealed folder the checkpoint of this name. The one that was there stays until this one is."""

    def discard(self, folder: Any) -> None:
        """Delete the folder of a save that was not published."""

    def current(self, path: Any) -> Any:
        """The folder that is the checkpoint of this name now; ``path`` itself if there is none."""

    def lock_for_reading(self, root: Any) -> int | None:
        """Keep a checkpoint from being deleted until the returned descriptor is closed. None: nothing keeps it."""

    def remove(self, path: Any) -> bool:
        """Remove the checkpoint of this name. False if somebody reads it: then it stays."""

    def leftovers(self, path: Any) -> Iterator[Any]:
        """Folders that killed saves and removals of this path left, and those beside it. Each is held while used."""

    def delete(self, folder: Any) -> None:
        """Delete a folder with all that is in it, as far as that is possible."""

    def names(self, directory: Any) -> Iterator[Any]:
        """The names that checkpoints in a directory may go by, one or more times each."""


def machine() -> str:
    """Return a name of this boot: the same for all processes that see each other's locks on any file system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="utf-8").strip() if boot.exists() else platform.node()


class LocalDisk:
    """Folders of a file system; see :class:`Storage`."""

    def begin(self, path: Path) -> tuple[Path, Callable[[], None]]:
        """See :class:`Storage`. In the same directory, so that publishing is a rename inside one file system."""
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = _temporary(path, "partial")
        folder.mkdir()
        lock = locked(folder)

        def release() -> None:
            if lock is not None:
                # closing is not enough: workers of a data loader, forked during the save, have the descriptor too
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)

        return folder, release

    def publish(self, folder: Path, path: Path) -> None:
        """See :class:`Storage`."""
        # The contents are on disk before the name is.
        sync_directory(folder)
        if not os.path.lexists(path):
            os.rename(folder, path)
            sync_directory(path.parent)
        elif _swap(folder, path):
            sync_directory(path.parent)
            self._dispose(folder, path)
        else:
            old = _temporary(path, "old")
            # For a moment there is none of this name. :meth:`current` then finds it under its old one.
            os.rename(path, old)
            try:
                os.rename(folder, path)
            except OSError:
                os.rename(old, path)
                raise
            sync_directory(path.parent)
            self._dispose(old, path)

    def discard(self, folder: Path) -> None:
        """See :class:`Storage`."""
        self.delete(folder)

    def current(self, path: Path) -> Path:
        """See :class:`Storage`.

        At ``path``; or, when a save was killed between sealing its folder and renaming it (or between the two renames
        of a replacement, on file systems that cannot swap), under the temporary name it still has.
        """
        if path.exists():
            return path
        # "partial" first: it is newer than what it was to replace.
        for state in ("partial", "old"):
            for candidate in sorted(path.parent.glob(f"{_escaped(path.name)}.{state}-*")):
                if _TEMPORARY.fullmatch(candidate.name) and manifests.complete(candidate) and not _saving(candidate):
                    return candidate
        return path

    def lock_for_reading(self, root: Path) -> int | None:
        """See :class:`Storage`.

        Returns:
            None where it is being removed: then reading fails with its own message. A descriptor without a lock where
            the file system has none.
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

    def remove(self, path: Path) -> bool:
        """See :class:`Storage`. Gone at once under its name, then deleted."""
        while True:
            root = self.current(path)
            try:
                lock = locked(root)
            except BlockingIOError:
                return False
            except FileNotFoundError:
                return True
            try:
                if self._taken(root, path, lock):
                    return True
            finally:
                if lock is not None:
                    os.close(lock)

    def leftovers(self, path: Path) -> Iterator[Path]:
        """See :class:`Storage`.

        A folder that a living process has locked is none. Where locks say nothing (the file system has none, or another
        machine works in the folder), only those of ``path`` itself are, and those that nobody has touched for a day.
        """
        for entry in _folders(path.parent):
            match = _TEMPORARY.fullmatch(entry.name)
            # A complete one whose path is missing *is* that checkpoint, and stays.
            if match is None or self.current(entry.with_name(match["path"])) == entry:
                continue
            try:
                lock = locked(entry)
            except (BlockingIOError, FileNotFoundError):
                continue
            try:
                lock_says = lock is not None and match["machine"] == _token()
                if lock_says or match["path"] == path.name or _abandoned(entry):
                    yield entry
            finally:
                if lock is not None:
                    os.close(lock)

    def delete(self, folder: Path) -> None:
        """See :class:`Storage`."""
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def names(self, directory: Path) -> Iterator[Path]:
        """See :class:`Storage`."""
        for entry in _folders(directory):
            match = _TEMPORARY.fullmatch(entry.name)
            yield entry.with_name(match["path"]) if match else entry

    def _taken(self, root: Path, path: Path, lock: int | None) -> bool:
        """Delete a folder that is locked; False if another run has put a new one in its place meanwhile, which stays.

        The readers of the new one hold that one, and a lock says nothing about them. So the folder gets another name
        first: what has it is either the one with the lock, or goes back. Until then it is found under this name by who
        asks for the checkpoint, and stays if this process is killed.
        """
        aside, trash = _temporary(path, "old"), _temporary(path, "removed")
        try:
            os.rename(root, aside)
            if lock is None or os.path.samestat(os.fstat(lock), os.stat(aside)):
                # Renamed before it is deleted: at every moment there is a whole checkpoint of this name, or none.
                os.rename(aside, trash)
                # The rename reaches the disk before anything is deleted.
                sync_directory(path.parent)
                self.delete(trash)
                return True
        except FileNotFoundError:
            return True
        try:
            os.rename(aside, root)
        except OSError:
            # A still newer one has come: this one is what it has replaced, unless its save has deleted it already.
            with suppress(FileNotFoundError):
                self._dispose(aside, path)
        return False

    def _dispose(self, folder: Path, path: Path) -> None:
        """Delete what was replaced at ``path``, or leave it as a leftover if somebody reads it."""
        try:
            lock = locked(folder)
        except BlockingIOError:
            # Under its present name it would be taken for the checkpoint, once that one is removed.
            os.rename(folder, _temporary(path, "removed"))
            return
        self.delete(folder)
        if lock is not None:
            os.close(lock)


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


def _saving(folder: Path) -> bool:
    """Whether a living save holds a folder. It renames it next, under the hands of who reads it by this name."""
    try:
        lock = locked(folder, fcntl.LOCK_SH)
    except (BlockingIOError, FileNotFoundError):
        return True
    if lock is not None:
        os.close(lock)
    return False


def _folders(directory: Path) -> Iterator[Path]:
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


def _swap(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that neither name is ever missing; False where the system cannot."""
    if sys.platform != "linux":
        return False
    # `renameat2` has no function in Python.
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return exchange is not None and exchange(here, os.fsencode(one), here, os.fsencode(other), flag) == 0
