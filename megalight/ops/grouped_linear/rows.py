"""The expert of each row of grouped rows. All casts of a layer ask for it, and get it from the first one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertsOfRows(NamedTuple):
    """The expert of each row.

    Attributes:
        counted: ``[R]``; rows after the last group have an expert more, ``E``.
        known: ``[R]``; those have the last expert.
        version: version of the offsets.
    """

    counted: Tensor
    known: Tensor
    version: int


def experts_of_rows(offsets: Tensor, rows: int) -> ExpertsOfRows:
    """Return the expert of each of so many rows; ``offsets [E]`` is the end of each group.

    It is kept on the offsets, until these are written.
    """
    # A recorded pass computes its own: what was computed before would never change again.
    recorded = offsets.is_cuda and torch.cuda.is_current_stream_capturing()
    keeps = not (recorded or offsets.is_inference())
    found: ExpertsOfRows | None = getattr(offsets, "megalight_rows", None) if keeps else None
    if found is not None and found.version == offsets._version and found.known.shape[0] == rows:
        return found
    row = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    counted = torch.searchsorted(offsets, row, right=True)
    known = counted.clamp(max=offsets.shape[0] - 1)
    found = ExpertsOfRows(counted, known, offsets._version if keeps else -1)
    if keeps:
        offsets.megalight_rows = found  # type: ignore[attr-defined]
    return found
