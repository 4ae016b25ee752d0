"""Newton-Schulz iteration: the nearest semi-orthogonal matrix, from products of matrices alone.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon: they raise small singular values quickly, and leave all of them between about 0.7 and 1.2."""


@torch.no_grad()
def newton_schulz(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Replace the singular values of matrices by values near 1.

    With ``X = G / |G|`` (Frobenius norm), each step computes ``X = a X + (b S + c S^2) X``, where ``S = X X^T``.

    Args:
        matrices: ``[B, m, n]``. A matrix of zeros stays zero.
        steps: number of steps.
        coefficients: ``(a, b, c)``.
        eps: least norm by which a matrix is divided.
        dtype: dtype of the products.

    Returns:
        ``[B, m, n]`` in ``dtype``.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype)
    # S is a product over the longer side, so that it is as small as can be.
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def newton_schulz_flops(m: int, n: int, steps: int = 5) -> int:
    """Return the floating-point operations for one matrix ``[m, n]``: a multiplication and an addition count as two."""
    short, long = min(m, n), max(m, n)
    return steps * (4 * short * short * long + 2 * short**3)
