"""The package. Its version has been 0.1 for years, so what it can do is told by which extensions were built."""

from __future__ import annotations

from megalight.plugins.package import Package

PACKAGE = Package(
    "apex",
    "apex",
    "build https://github.com/NVIDIA/apex with its C++ and CUDA extensions (PyPI's apex is another package)",
)


def why_not(device: str, feature: str, *paths: str) -> str | None:
    """Why the package cannot serve ``feature``, or None. Extensions are modules of their own in ``paths``."""
    return PACKAGE.why_not(device, feature, *paths)
