"""nvidia-resiliency-ext (https://github.com/NVIDIA/nvidia-resiliency-ext): restarts inside the process.

Its ``inprocess.Wrapper`` calls an ``Abort`` in a thread of its own when a rank has failed, and then runs the wrapped
function again. A save beside training would go on meanwhile: :func:`abort_saves` makes an ``Abort`` that ends it.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from megalight.errors import MissingPackageError
from megalight.plugins.package import Package

PACKAGE = Package("nvidia_resiliency_ext", "nvidia-resiliency-ext", "pip install nvidia-resiliency-ext")
ABORT = "nvidia_resiliency_ext.inprocess.abort:Abort"


class Saving(Protocol):
    """What has saves beside training: a :class:`~megalight.strategies.MegatronStrategy`."""

    def abort_saves(self) -> None:
        """Kill the worker process of this rank and forget its save."""


def why_not() -> str | None:
    """Return why there is no in-process restarter, or None."""
    try:
        PACKAGE.load(ABORT)
    except MissingPackageError as error:
        return str(error)
    return None


def abort_saves() -> Any:
    """Make an ``Abort`` for ``inprocess.Wrapper(abort=inprocess.Compose(...))``.

    The wrapped function builds a strategy in each restart, so it says which one: ``abort.follow(strategy)``.

    Raises:
        MissingPackageError: the package is missing.
    """

    class AbortSaves(PACKAGE.load(ABORT)):  # type: ignore[misc]
        """Aborts the saves of the strategies that it follows."""

        def __init__(self) -> None:
            # The strategy of a run that has ended must not stay in memory for the next one.
            self._followed: weakref.WeakSet[Saving] = weakref.WeakSet()

        def follow(self, strategy: Saving) -> None:
            """Abort the saves of this strategy, too."""
            self._followed.add(strategy)

        def __call__(self, state: Any) -> Any:
            """Abort, in any thread, and hand the state on to the next in the row."""
            for strategy in list(self._followed):
                strategy.abort_saves()
            return state

    return AbortSaves()
