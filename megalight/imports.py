"""Optional packages: whether they are here, and a clear error where they are not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from types import ModuleType

from megalight.errors import MissingPackageError

EXTRAS = {
    "transformers": "transformers",
    "pyarrow": "parquet",
    "matplotlib": "plot",
    "tensorboard": "tensorboard",
    "triton": "triton",
    "transformer_engine": "te",
    "flash_attn": "flash-attn",
    "apex": "apex",
}
"""Import name of an optional package -> the pip extra of Megalight that brings it."""


def has(package: str) -> bool:
    """Whether ``package`` (an import name) is installed. Imports nothing."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None. Imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(package: str, purpose: str) -> ModuleType:
    """Import ``package``.

    Raises:
        MissingPackageError: it is not installed; the message names ``purpose`` and the pip command.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        root = package.partition(".")[0]
        wanted = f"'megalight[{EXTRAS[root]}]'" if root in EXTRAS else root
        raise MissingPackageError(
            f"{purpose} needs the package {root!r}, which could not be imported ({error}). "
            f"Install it with: pip install {wanted}"
        ) from error
