"""The gradient of a table in plain torch: made for the whole table, then written or added."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.parameter import put


def add_rows(main_grad: Tensor, ids: Tensor, grad: Tensor, write: bool) -> None:
    """Implement :data:`megalight.ops.embedding.AddRows`."""
    rows = len(main_grad)
    inside = ids < rows
    # Row 0 gets zeros from the tokens that have no row.
    grad = torch.where(inside.unsqueeze(-1), grad, 0)
    whole = torch.ops.aten.embedding_dense_backward(grad, torch.where(inside, ids, 0), rows, -1, False)
    put(main_grad, whole, write)
