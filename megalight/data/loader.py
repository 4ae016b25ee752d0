"""A data loader that resumes where the trainer's step count says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader


class TokenLoader(DataLoader[Any]):
    """A ``DataLoader`` whose sampler asks the trainer for the position in the data when the first batch is taken.

    Lightning may create an iterator before it restores a checkpoint, to count the steps of a schedule. So nothing is
    read until the first batch is requested. The loader has no state of its own; the methods of a resumable loader
    tell Lightning so.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()  # a generator: the sampler is not asked before the first batch

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position follows from the trainer's step count."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing."""
