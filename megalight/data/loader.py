"""Batches of tokens: how samples become one, and a loader that resumes with the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from megalight.data.gpt import Sample
from megalight.types import TokenBatch


def collate(samples: Sequence[Sample]) -> TokenBatch:
    """Samples as the rows of a batch."""
    documents = tuple(sample.document_lengths for sample in samples if sample.document_lengths is not None)
    return TokenBatch(
        torch.from_numpy(np.stack([sample.tokens for sample in samples])),
        torch.from_numpy(np.stack([sample.labels for sample in samples])),
        torch.from_numpy(np.stack([sample.loss_mask for sample in samples])),
        documents or None,
    )


class TokenLoader(DataLoader[Any]):
    """A ``DataLoader`` whose place in the data follows from the trainer's step count when its first batch is taken.

    Lightning may make an iterator before it has restored a checkpoint (to count steps for a schedule), so nothing is
    read until a batch is wanted. It has no state of its own, and says so by the methods of a resumable loader.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the place is not the loader's to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""
