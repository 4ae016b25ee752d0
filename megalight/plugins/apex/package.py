"""The package Apex. Its version has been 0.1 for years, so we look for the extensions that were built."""

from __future__ import annotations

from megalight.plugins.package import Package

PACKAGE = Package(
    "apex",
    "apex",
    "build https://github.com/NVIDIA/apex with its C++ and CUDA extensions (PyPI's apex is another package)",
)


def why_not(device: str, feature: str, *paths: str) -> str | None:
    """Return why the package cannot serve ``feature``, or None. Extensions are separate modules in ``paths``."""
    # No minimum: all its releases call themselves 0.1.
    return PACKAGE.why_not(device, feature, *paths)
