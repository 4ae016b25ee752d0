"""An optional package behind its fence: whether it is here, new enough and whole, and what it offers."""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from dataclasses import dataclass
from typing import Any

from megalight import imports
from megalight.errors import MissingPackageError
from megalight.ops.common import cuda_why_not


def release(version: str) -> tuple[int, ...]:
    """``"2.12.0+cu13"`` as ``(2, 12, 0)``: what versions are compared by."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


@dataclass(frozen=True)
class Package:
    """One optional package.

    Attributes:
        name: what is imported.
        distribution: what is installed.
        how: the command, or the place, that brings it.
    """

    name: str
    distribution: str
    how: str

    @property
    def version(self) -> str | None:
        """The installed version; None where nothing tells it. Imports the package where its metadata is missing."""
        found = imports.version(self.distribution)
        if found is None and imports.has(self.name.partition(".")[0]):
            try:
                found = getattr(self.load(self.name), "__version__", None)
            except MissingPackageError:
                return None
        return found

    def why_not(self, device: str, feature: str, *paths: str, minimum: str | None = None) -> str | None:
        """Why the package cannot serve ``feature``, or None. What can be told without importing it is told first.

        Args:
            device: type of the tensors' device; these packages know CUDA alone.
            feature: what is wanted, for the message.
            paths: modules, or ``module:attribute``, that it takes; imported in this order.
            minimum: the first version that has it.
        """
        if not imports.has(self.name.partition(".")[0]):
            return f"needs the package {self.name}, which is not installed. Next: {self.how}"
        if (reason := cuda_why_not(device)) is not None:
            return reason
        found = self.version
        if minimum is not None and found is not None and release(found) < release(minimum):
            return f"{feature} needs {self.name} >= {minimum}, found {found}. Next: {self.how}"
        for path in paths:
            try:
                self.load(path)
            except MissingPackageError as error:
                return f"{feature}: {error}"
        return None

    def load(self, path: str) -> Any:
        """A module, or ``module:attribute``.

        Raises:
            MissingPackageError: it cannot be had; the message says why, and what to do.
        """
        return _load(self, path)


@functools.lru_cache(maxsize=256)
def _load(package: Package, path: str) -> Any:
    """Remembered: kernels are looked up in every call, in threads of autograd's own too."""
    module, _, attribute = path.partition(":")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a package warns of while it is imported is its own concern
            found = importlib.import_module(module)
    except Exception as error:  # a missing shared library, a failed build, another torch: packages raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise MissingPackageError(
            f"{module} could not be imported ({type(error).__name__}: {reason}). Next: {package.how}"
        ) from error
    if not attribute:
        return found
    if not hasattr(found, attribute):
        raise MissingPackageError(
            f"{module} has no {attribute} in {package.distribution} {package.version or '(unknown version)'}. "
            f"Next: {package.how}"
        )
    return getattr(found, attribute)
