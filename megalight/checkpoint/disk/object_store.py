"""Object stores (``s3://``, ``gs://``, ``memory://``, ...): how they keep the states of a checkpoint folder.

A store has no rename and no locks, but an object appears as a whole. So each save of ``<path>`` writes into a folder of
its own, ``<path>/save-<token>``, and its manifest, written last, publishes it. The checkpoint is the newest such folder
with a manifest. One without is a save in progress, or a leftover: the token names the process that writes it, and other
machines judge by its age. When a save is published, the folders before it are deleted. No torch in here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import has_magic
from pathlib import Path

from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk import storage
from megalight.checkpoint.disk.address import Address
from megalight.errors import CheckpointError

log = logging.getLogger(__name__)

_TOKEN = "save-"

_UNDER_WAY: set[str] = set()
"""Saves that this process is writing."""


class ObjectStore:
    """Folders of objects; see :class:`~megalight.checkpoint.disk.storage.Storage`."""

    def begin(self, path: Address) -> tuple[Address, Callable[[], None]]:
        """See :class:`~megalight.checkpoint.disk.storage.Storage`. The process holds it by the token."""
        folder = path / f"{_TOKEN}{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
        _UNDER_WAY.add(folder.url)
        return folder, lambda: _UNDER_WAY.discard(folder.url)

    def publish(self, folder: Address, path: Address) -> None:
        """See :class:`~megalight.checkpoint.disk.storage.Storage`. The manifest has done it: older saves go."""
        with _left_for_later(path):
            own = _order(folder)
            for save in _saves(path):
                # Older ones alone. Two runs may save the same path at once: each would delete what the other has
                # published, or is writing.
                if (0, "") <= _order(save) < own:
                    self.delete(save)
            # A checkpoint that was copied there by hand lies in the path itself.
            if _sealed(path) and _order(path) < own:
                _delete_copied(path)

    def discard(self, folder: Address) -> None:
        """See :class:`~megalight.checkpoint.disk.storage.Storage`."""
        with _left_for_later(folder):
            # What it replaced may be gone already: then it is the only one.
            if not _sealed(folder):
                self.delete(folder)

    def current(self, path: Address) -> Address:
        """See :class:`~megalight.checkpoint.disk.storage.Storage`.

        The newest save of this path that is published; the path itself where a folder was copied there by hand.
        """
        return _newest(path, [save for save in (path, *_saves(path)) if _sealed(save)])

    def lock_for_reading(self, root: Address) -> None:
        """See :class:`~megalight.checkpoint.disk.storage.Storage`.

        Who reads a removed checkpoint gets an error, never wrong values.
        """

    def remove(self, path: Address) -> bool:
        """See :class:`~megalight.checkpoint.disk.storage.Storage`."""
        with suppress(FileNotFoundError, NotADirectoryError):
            # One by one, never the whole: another run may be writing a save of this path, or begin to.
            for part in sorted(path.iterdir(), key=lambda part: part.name != manifests.NAME):
                if not part.name.startswith(_TOKEN) or _sealed(part) or _left(part):
                    self.delete(part)
        # Some stores have folders of their own, which stay when they are empty.
        with suppress(OSError):
            path.store.rmdir(path.key)
        return True

    def leftovers(self, path: Address) -> Iterator[Address]:
        """See :class:`~megalight.checkpoint.disk.storage.Storage`.

        Saves of this path that were replaced or whose writer is dead; and those beside it whose writer is dead or has
        not written for a day. Also what a killed removal left: its manifest is gone, so nobody reads it.
        """
        saves = _saves(path)
        # Each is asked once, and before: another run may publish its save and end at any moment.
        dead = {save for save in saves if _dead(save)}
        sealed = [save for save in (path, *saves) if _sealed(save)]
        current = _newest(path, sealed)
        for save in saves:
            # A sealed one was replaced, and its deletion was cut short. Another run may be writing one that is not.
            if save != current and (save in sealed or save in dead or _abandoned(save)):
                yield save
        for other in self.names(path.parent):
            for save in _saves(other) if other != path else []:
                if _left(save):
                    yield save

    def delete(self, folder: Address) -> None:
        """See :class:`~megalight.checkpoint.disk.storage.Storage`."""
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

    def names(self, directory: Address) -> Iterator[Address]:
        """See :class:`~megalight.checkpoint.disk.storage.Storage`."""
        with suppress(FileNotFoundError, NotADirectoryError):
            yield from (each for each in directory.iterdir() if each.is_dir())


def _newest(path: Address, sealed: list[Address]) -> Address:
    # The manifest of a single one need not be read.
    return max(sealed, key=_order, default=path) if len(sealed) != 1 else sealed[0]


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


def _left(save: Address) -> bool:
    """Whether a save is a leftover: it is not published, and nobody is writing it."""
    # Asked first: a process may publish its save and end between the two questions.
    dead = _dead(save)
    return not _sealed(save) and (dead or _abandoned(save))


def _machine() -> str:
    """A name for all processes that see each other's ids: containers of one machine do not."""
    space = Path("/proc/self/ns/pid")
    seen = f"{storage.machine()} {os.readlink(space) if space.exists() else ''}"
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
        old = (now - folder.ask("modified", key).timestamp() > storage.ABANDONED_SECONDS for key in found)
        return bool(found) and all(old)
    except FileNotFoundError:  # another process is deleting it
        return False
