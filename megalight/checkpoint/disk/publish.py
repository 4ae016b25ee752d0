"""The life of a checkpoint folder: begun, written, sealed, published, removed; recovered after a kill.

1. :class:`Save` begins: it deletes leftovers (:func:`recover`) and makes a folder that readers do not see.
2. All ranks write their files there (:mod:`megalight.checkpoint.disk.rank_files`).
3. The manifest seals it (:mod:`megalight.checkpoint.disk.manifest`): from here on it is whole.
4. :func:`publish` makes it the checkpoint of its name, then deletes the one before. At every moment a reader of this
   name finds one whole checkpoint (:func:`resolve`), and keeps it while it reads (:func:`lock_for_reading`).
5. :func:`remove` removes it. A process that is killed in any step leaves the checkpoint before, or the new one.

A :class:`~megalight.checkpoint.disk.storage.Storage` does the steps: a local disk by renames and locks, an object store
by the manifest alone. No torch in here.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk.address import Address
from megalight.checkpoint.disk.files import PathLike
from megalight.checkpoint.disk.object_store import ObjectStore
from megalight.checkpoint.disk.storage import LocalDisk, Storage
from megalight.errors import CheckpointError

_LOCAL_DISK = LocalDisk()
_OBJECT_STORE = ObjectStore()


class Save:
    """One save of a checkpoint, from its start to :meth:`publish` or :meth:`discard`. Made by one process for all.

    Args:
        path: the name of the checkpoint.
        in_place: write a folder of a store under its own name; see :func:`begin_folder`.

    Attributes:
        folder: where it is written.

    Raises:
        CheckpointError: something else has this name.
    """

    def __init__(self, path: PathLike, *, in_place: bool = False) -> None:
        self.path = path
        self.folder: Any = path
        self._storage = storage_of(path)
        self._hold = ExitStack()
        if in_place:
            if path.exists():
                raise CheckpointError(
                    f"{path} is there already, and a store has no rename to replace it by; remove it."
                )
            return
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} exists and is not a folder. Save elsewhere, or remove it.")
        recover(path)
        self.folder, release = self._storage.begin(path)
        self._hold.callback(release)

    def publish(self) -> None:
        """Make the sealed folder the checkpoint of its name. The one that was there stays until this one is."""
        if self.folder != self.path:
            self._storage.publish(self.folder, self.path)
        self.release()

    def discard(self) -> None:
        """Delete it, unless it is published. The checkpoint that was there before stays."""
        try:
            self._storage.discard(self.folder)
        finally:
            self.release()

    def release(self) -> None:
        """Give up the hold: others take the folder for what it is, published or a leftover."""
        self._hold.close()


def begin_folder(path: PathLike) -> Save:
    """Begin to write a folder for others to read, which has no manifest.

    A store has no rename: there the folder is written in place, and its readers wait for its last file.
    """
    return Save(path, in_place=isinstance(path, Address))


def publish(folder: PathLike, path: PathLike) -> None:
    """Make a sealed folder the checkpoint of a name, in another process than that of its :class:`Save`."""
    storage_of(path).publish(folder, path)


def recover(path: PathLike) -> None:
    """Delete what killed saves and removals left of this path and beside it. A whole checkpoint is no leftover."""
    storage = storage_of(path)
    for folder in storage.leftovers(path):
        storage.delete(folder)


def remove(path: str | os.PathLike[str]) -> bool:
    """Remove a checkpoint. Nothing happens when it is not there.

    Returns:
        False if somebody reads it: then it stays.
    """
    found = place(path)
    return storage_of(found).remove(found)


def resolve(path: str | os.PathLike[str]) -> PathLike:
    """The folder that is the checkpoint of this name now."""
    found = place(path)
    folder: PathLike = storage_of(found).current(found)
    return folder


def lock_for_reading(root: PathLike) -> int | None:
    """Open a checkpoint's folder and lock it for reading: nobody deletes it until the returned descriptor is closed.

    Returns:
        None where nothing keeps it: in an object store, or when it is being removed. Then reading raises an error.
    """
    return storage_of(root).lock_for_reading(root)


def delete(folder: PathLike) -> None:
    """Delete a folder with all that is in it, as far as that is possible."""
    storage_of(folder).delete(folder)


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a finished checkpoint with all its files, judged by names and sizes.

    Raises:
        StorageError, OSError: its storage does not answer.
    """
    return manifests.complete(resolve(path)) is not None


def finished(directory: str | os.PathLike[str]) -> list[PathLike]:
    """All finished checkpoints in a directory, oldest first."""
    found: dict[PathLike, int] = {}
    where = place(directory)
    for path in storage_of(where).names(where):
        manifest = None if path in found else manifests.complete(resolve(path))
        if manifest is not None:
            found[path] = manifest.saved_at
    return sorted(found, key=lambda path: (found[path], path))


def latest(directory: str | os.PathLike[str]) -> PathLike | None:
    """The newest finished checkpoint in a directory, or None. What a killed save left does not count."""
    return next(reversed(finished(directory)), None)


def storage_of(path: PathLike) -> Storage:
    """What does the steps for a path."""
    return _OBJECT_STORE if isinstance(path, Address) else _LOCAL_DISK


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
    return Address(f"{protocol}://{rest.rstrip('/')}")


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


def forget_listings(path: PathLike) -> None:
    """Let other readers in this process see that a checkpoint was written or removed."""
    if isinstance(path, Address):
        path.forget_listings()
