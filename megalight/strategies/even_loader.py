"""Loaders with equally many batches on all ranks, for data-parallel ranks that communicate in forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalight.errors import DataError
from megalight.parallel.coupling import Coupling, emptied


def even(loader: Any, coupling: Coupling) -> Any:
    """Return a loader with as many batches as the longest loader of all ranks. It adds empty batches at its end.

    All ranks along ``dp`` call this together. Loaders of equal lengths are returned unchanged.

    Raises:
        DataError: a loader has no batch, so no empty batch can be made from it. All ranks raise.
    """
    try:
        length = len(loader)
    except TypeError:
        return _Asking(loader, coupling)
    # a maximum of negated lengths is the negated minimum
    longest, shortest = coupling.most(length), -coupling.most(-length)
    if longest == shortest:
        return loader
    if not shortest:
        raise DataError(
            f"a data-parallel rank has no batch while another has {longest}, and ranks that share experts must run "
            "equally many. Give each at least one batch."
        )
    return _Padded(loader, longest)


class _Padded:
    """A loader of known length, filled up with empty batches. Other attributes are the loader's."""

    def __init__(self, loader: Any, length: int) -> None:
        self.loader = loader
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        batch = None
        for batch in self.loader:
            yield batch
        # The last batch again, as `coupling.Empty` says. Its losses are multiplied by zero.
        for _ in range(self.length - len(self.loader)):
            yield emptied(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)


class _Asking:
    """A loader of unknown length. Before each batch, ranks check whether any of them has another batch."""

    def __init__(self, loader: Any, coupling: Coupling) -> None:
        self.loader = loader
        self.coupling = coupling

    def __iter__(self) -> Iterator[Any]:
        end = object()
        batches, last = iter(self.loader), end
        while True:
            batch = next(batches, end)
            # On the host, before the batch is used: a rank that stops alone would leave others in a collective.
            if not self.coupling.most(batch is not end):
                return
            if batch is end and last is end:
                raise DataError("this rank's loader has no batch to repeat while another rank's goes on; give it one.")
            last = last if batch is end else batch
            yield emptied(last) if batch is end else batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)
