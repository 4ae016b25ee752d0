"""A folder that is read to its end, whatever its name means by then."""

from __future__ import annotations

import os
from pathlib import Path, PosixPath
from typing import Self

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
