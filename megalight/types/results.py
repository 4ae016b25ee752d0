"""A micro-batch together with what frozen models made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class WithResults:
    """What ``forward_step`` and ``loss_step`` get in place of a micro-batch in a run with frozen models.

    Attributes:
        batch: the micro-batch.
        results: name of a frozen model -> what its last chunk returned for this micro-batch.
    """

    batch: Any
    results: Mapping[str, Mapping[str, Tensor]]


def opened(batch: Any) -> tuple[Any, Mapping[str, Mapping[str, Tensor]]]:
    """Return a micro-batch without results, and the results; none if no frozen model ran."""
    return (batch.batch, batch.results) if isinstance(batch, WithResults) else (batch, {})
