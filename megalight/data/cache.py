"""A cache on disk for arrays that are expensive to build. All processes map the same files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from megalight.errors import DataError

Arrays = dict[str, NDArray[Any]]
DESCRIPTION = "description.txt"


def build_once(
    folder: str | os.PathLike[str], label: str, description: Mapping[str, object], build: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays of ``build()`` as memory maps. They are built only if they are not in the cache.

    An entry is the folder ``<folder>/<hash of the description>-<label>/`` with one ``.npy`` file per array and the
    description. Any number of processes may call this at once: one builds, the others wait for its lock. If that
    process dies, the system frees the lock. A finished entry appears by one rename. An entry that is incomplete, or has
    another description, is built again.

    Args:
        folder: folder of the cache; it is created if needed.
        label: readable part of the entry's name.
        description: everything that the arrays depend on, as JSON values.

    Raises:
        DataError: the folder cannot be written, or is no folder of this machine.
    """
    if "://" in os.fspath(folder):
        raise DataError(
            f"cache_dir is {os.fspath(folder)!r}; caches are mapped into memory, so give a folder of this machine, or "
            "one that it mounts."
        )
    # Sorted keys: the same facts give the same name, whatever order they come in.
    text = json.dumps({"label": label, **description}, sort_keys=True, indent=1)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    place = Path(folder)
    entry = place / f"{key}-{label}"
    arrays = _load(entry, text)
    if arrays is not None:
        return arrays
    try:
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / f"{key}.lock"):
            arrays = _load(entry, text)  # another process may have built it while this one waited
            if arrays is None:
                _publish(entry, text, build())
                arrays = _load(entry, text)
    except OSError as error:
        raise DataError(
            f"the index cache {place} cannot be written ({error}); set cache_dir to a writable folder."
        ) from error
    if arrays is None:
        raise DataError(f"the index cache {entry} cannot be read back; remove it, or set cache_dir to another folder.")
    return arrays


class CachedDataset:
    """A data set that another process makes again from its arguments: cached arrays are mapped, not pickled."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Keep the arguments."""
        found = super().__new__(cls)
        found._arguments = arguments, options
        return found

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        arguments, options = self._arguments
        return partial(type(self), **options), arguments


def cache_folder(given: str | os.PathLike[str] | None, prefix: str) -> str | os.PathLike[str]:
    """Return the folder of cached indices of token files: the given one, or ``cache`` beside them."""
    return given or os.path.join(os.path.dirname(prefix), "cache")


def order_of(facts: object) -> str:
    """Return the hash of all that the order of samples depends on, as JSON values."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _load(entry: Path, text: str) -> Arrays | None:
    try:
        # The name holds only a part of the hash. The whole description decides.
        if (entry / DESCRIPTION).read_text(encoding="utf-8") != text:
            return None
        # Plain arrays over the map: slices of numpy's memmap class are several times slower.
        return {file.stem: np.asarray(np.load(file, mmap_mode="r", allow_pickle=False)) for file in entry.glob("*.npy")}
    except (OSError, ValueError, EOFError):
        return None


def _publish(entry: Path, text: str, arrays: Arrays) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".tmp", dir=entry.parent))
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private, but users share caches
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array, allow_pickle=False)
        # The description comes last, so that an entry without it is not complete.
        (temporary / DESCRIPTION).write_text(text, encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        try:
            os.replace(temporary, entry)
        except OSError:
            # A process on another machine, which the lock may not reach, may have published the entry first.
            if _load(entry, text) is None:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
