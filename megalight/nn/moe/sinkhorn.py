"""Choice of experts by Sinkhorn's iteration (https://arxiv.org/abs/2103.16716)."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.common import wide
from megalight.ops.router import Routes

TOLERANCE, LIMIT = 1e-4, 100
"""The iteration ends when the factors of the experts change less on average, or after so many rounds."""


def sinkhorn_routes(logits: Tensor, top_k: int, *, balanced: bool) -> Routes:
    """Weigh by scores over all experts, a softmax or, for a single expert, sigmoids; choose by balanced logits.

    Args:
        logits: ``[T, E]``.
        top_k: number of experts of each token.
        balanced: False: choose by the scores.
    """
    # At least float32: the iteration multiplies many small numbers.
    logits = logits.to(wide(logits.dtype))
    scores = logits.sigmoid() if top_k == 1 else logits.softmax(-1)
    # Detached: gradients flow through the scores only, not through the choice.
    experts = (sinkhorn(logits.detach()) if balanced else scores.detach()).topk(top_k, dim=-1).indices
    return Routes(scores.gather(-1, experts), experts)


def sinkhorn(logits: Tensor) -> Tensor:
    """Scale rows and columns of ``exp(logits) [T, E]``: each row sums to ``1 / T``, and each column to ``1 / E``."""
    if not len(logits):
        return logits
    # a common factor does not change the result, and avoids overflow
    matrix = (logits - logits.max()).exp()
    tiny = torch.finfo(matrix.dtype).tiny
    rows, columns = matrix.new_ones(matrix.shape[0]), matrix.new_ones(matrix.shape[1])
    for _ in range(LIMIT):
        # Clamped: a row or column of zeros would give infinity, and then NaN.
        rows = 1 / (len(rows) * (matrix @ columns).clamp(min=tiny))
        before, columns = columns, 1 / (len(columns) * (rows @ matrix).clamp(min=tiny))
        # The host reads this number, so it waits for the device in each round.
        if float((columns - before).abs().mean() / columns.abs().mean()) < TOLERANCE:
            break
    return rows[:, None] * matrix * columns
