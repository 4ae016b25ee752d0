"""The angles of rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.rotary.scaling import RotaryScaling, unscaled


def rotary_table(
    positions: Tensor, dim: int, base: float, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles ``position * base^(-2i/dim)`` (Su et al. 2021).

    Args:
        positions: ``[T]`` integers, or float64 for a float64 table.
        dim: number of features that are rotated; even.
        base: theta.
        scaling: scaling of the frequencies. Its concentration multiplies cosines and sines.

    Returns:
        ``cos, sin``, each ``[T, dim/2]`` float32. Angles are computed in float64, because float32 loses the fraction of
        a turn at long contexts.

    Raises:
        ValueError: ``dim`` is odd, or too small for the scaling.
    """
    if dim % 2:
        raise ValueError(f"rotary dim is {dim}; it must be even, because features are rotated in pairs.")
    device = positions.device
    frequencies = unscaled(dim, base, device) if scaling is None else scaling.frequencies(dim, base, device)
    angles = positions.to(torch.float64)[:, None] * frequencies
    dtype = torch.float64 if torch.float64 in (positions.dtype, torch.get_default_dtype()) else torch.float32
    # a factor of both is a factor of the rotated features, in forward and backward of every backend
    factor = 1.0 if scaling is None else scaling.concentration
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
