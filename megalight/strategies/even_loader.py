"""Loaders of different lengths, where data-parallel ranks meet in every forward pass: all give equally many batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalight.errors import DataError
from megalight.parallel.coupling import Coupling, emptied


def even(loader: Any, coupling: Coupling) -> Any:
    """A loader that gives as many batches as the longest of the ranks' loaders: past its own end, empty ones.

    Ranks along ``dp`` call this together. Loaders of equal lengths are returned as they are.

    Raises:
        DataError: on all of them, where any has no batch to repeat.
    """
    try:
        length = len(loader)
    except TypeError:
        return _Asking(loader, coupling)
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
    """A loader of known length, and empty batches up to another one. Its attributes are the loader's."""

    def __init__(self, loader: Any, length: int) -> None:
        self.loader = loader
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        batch = None
        for batch in self.loader:
            yield batch
        for _ in range(self.length - len(self.loader)):
            yield emptied(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)


class _Asking:
    """A loader of unknown length: before each batch, ranks ask whether any of them has another one."""

    def __init__(self, loader: Any, coupling: Coupling) -> None:
        self.loader = loader
        self.coupling = coupling

    def __iter__(self) -> Iterator[Any]:
        end = object()
        batches, last = iter(self.loader), end
        while True:
            batch = next(batches, end)
            if not self.coupling.most(batch is not end):
                return
            if batch is end and last is end:
                raise DataError("this rank's loader has no batch to repeat while another rank's goes on; give it one.")
            last = last if batch is end else batch
            yield emptied(last) if batch is end else batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)
