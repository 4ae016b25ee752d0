"""The number of samples in a batch of any form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def count_samples(batch: Any) -> int:
    """Count samples: the length of the first tensor or object with a length in a batch. 0 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        return next((samples for value in batch if (samples := count_samples(value))), 0)
    return len(batch) if hasattr(batch, "__len__") and not isinstance(batch, str | bytes) else 0


def weights(micro_batches: Sequence[Any]) -> list[float]:
    """Return each micro-batch's fraction of all samples. The fractions are equal if samples cannot be counted."""
    sizes = [count_samples(micro_batch) for micro_batch in micro_batches]
    # Samples that cannot be counted are taken to be equally many.
    if not all(sizes):
        return [1 / len(sizes)] * len(sizes)
    return [size / sum(sizes) for size in sizes]
