"""Sums of rows in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_rows(out: Tensor, rows: Tensor, add: bool) -> None:
    """Implement :func:`megalight.ops.sum_rows.sum_rows`."""
    wide = torch.promote_types(torch.promote_types(rows.dtype, out.dtype), torch.float32)
    total = rows.sum(0, dtype=wide)
    if add:
        out.add_(total)
    else:
        out.copy_(total)
