"""The angles of rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.rotary.axes import RotaryAxes
from megalight.ops.rotary.scaling import RotaryScaling, unscaled


def rotary_table(
    positions: Tensor, dim: int, base: float, scaling: RotaryScaling | None = None, axes: RotaryAxes | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles ``position * base^(-2i/dim)`` (Su et al. 2021).

    Args:
        positions: ``[T]`` integers, or float64 for a float64 table; with ``axes`` also ``[A, T]``, one row per axis.
        dim: number of features that are rotated; even.
        base: theta.
        scaling: scaling of the frequencies. Its concentration multiplies cosines and sines.
        axes: the axis of each pair. None: there is one axis.

    Returns:
        ``cos, sin``, each ``[T, dim/2]`` float32. Angles are computed in float64, because float32 loses the fraction of
        a turn at long contexts.

    Raises:
        ValueError: ``dim`` is odd, or too small for the scaling; axes do not agree with ``dim``, the positions or the
            scaling.
    """
    if dim % 2:
        raise ValueError(f"rotary dim is {dim}; it must be even, because features are rotated in pairs.")
    device = positions.device
    frequencies = unscaled(dim, base, device) if scaling is None else scaling.frequencies(dim, base, device)
    if axes is not None and sum(axes.sections) != dim // 2:
        raise ValueError(
            f"sections of rotary axes are {list(axes.sections)}, which sum to {sum(axes.sections)}; {dim} rotated "
            f"features have {dim // 2} pairs."
        )
    if axes is not None and axes.restart:
        if scaling is not None:
            raise ValueError("rotary axes that restart their frequencies have no scaling; leave it out.")
        frequencies = torch.cat([unscaled(2 * pairs, base, device) for pairs in axes.sections])
    places = positions.to(torch.float64)
    angles = (places[:, None] if places.dim() == 1 else _of_pairs(places, axes)) * frequencies
    dtype = torch.float64 if torch.float64 in (positions.dtype, torch.get_default_dtype()) else torch.float32
    # a factor of both is a factor of the rotated features, in forward and backward of every backend
    factor = 1.0 if scaling is None else scaling.concentration
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _of_pairs(places: Tensor, axes: RotaryAxes | None) -> Tensor:
    """``[A, T] -> [T, dim/2]``: the position that turns each pair."""
    if axes is None or len(axes.sections) != len(places):
        expected = "one axis" if axes is None else f"{len(axes.sections)} axes"
        raise ValueError(f"positions have {len(places)} rows, one per axis, but the rotary embedding has {expected}.")
    # Rows, stacked on the device: an index tensor would be copied from the host for each micro-batch.
    return torch.stack([places[axis] for axis in axes.of_pairs], dim=-1)
