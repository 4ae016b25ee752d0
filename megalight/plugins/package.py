"""Access to an optional package: whether it is installed, new enough and complete, and its functions."""

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
    """Parse ``"2.12.0+cu13"`` to ``(2, 12, 0)``, to compare versions."""
    # Suffixes such as `+cu13` or `rc1` do not take part in the comparison.
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


@dataclass(frozen=True)
class Package:
    """One optional package.

    Attributes:
        name: import name.
        distribution: name of the distribution that is installed.
        how: how to install it: a command, or where to find it.
    """

    name: str
    distribution: str
    how: str

    @property
    def version(self) -> str | None:
        """The installed version, or None if it is unknown. Without metadata, the package is imported."""
        found = imports.version(self.distribution)
        # A build from sources may have no metadata; the import costs time, so it comes last.
        if found is None and imports.has(self.name.partition(".")[0]):
            try:
                found = getattr(self.load(self.name), "__version__", None)
            except MissingPackageError:
                return None
        return found

    def why_not(self, device: str, feature: str, *paths: str, minimum: str | None = None) -> str | None:
        """Return why the package cannot serve ``feature``, or None. The package is imported only if all else is fine.

        Args:
            device: device type of the tensors; these packages serve only CUDA.
            feature: the feature, for the message.
            paths: modules, or ``module:attribute``, that the feature needs. They are imported in this order.
            minimum: the first version that has the feature.
        """
        # In the order of cost: `find_spec` imports nothing, the device is known, versions are files.
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
        """Import a module, or ``module:attribute``, and return it.

        Raises:
            MissingPackageError: it is not available. The message has the reason and the next step.
        """
        return _load(self, path)


# By package and path; both are frozen.
@functools.lru_cache(maxsize=256)
def _load(package: Package, path: str) -> Any:
    """Import and cache: kernels are looked up in every call, also in autograd's threads."""
    module, _, attribute = path.partition(":")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # users cannot change what a package does when it is imported
            found = importlib.import_module(module)
    except Exception as error:  # packages raise anything: a missing shared library, a failed build, another torch
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
