"""A fixed random rotation of sixteen neighboring elements: a Hadamard matrix with random signs.

It is orthogonal, so ``(a H)(b H)^T = a b^T``. It spreads an outlier over sixteen elements, so that fewer of the others
round to 0. See https://arxiv.org/abs/2509.25149, section 4.2.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

SIZE = 16
SIGNS = (1, -1, 1, 1, -1, -1, 1, -1, 1, 1, -1, 1, -1, -1, -1, 1)
"""Drawn once: according to the paper, one choice for all layers and steps is as good as many."""


@lru_cache(maxsize=8)
def rotation(device: torch.device) -> Tensor:
    """Return the rotation ``[16, 16]``: orthogonal, float32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < SIZE:
        # Sylvester's construction.
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    # Signs on the rows: without them, sixteen equal values would all land in one element.
    signs = torch.tensor(SIGNS, dtype=torch.float32)[:, None]
    return torch.mul(signs, matrix / SIZE**0.5).to(device)


def rotate(x: Tensor) -> Tensor:
    """Rotate each group of sixteen neighbors along ``K``: ``[R, K]`` to float32 ``[R, K]``, ``K`` a multiple of 16."""
    return torch.matmul(x.float().reshape(len(x), -1, SIZE), rotation(x.device)).reshape(x.shape)
