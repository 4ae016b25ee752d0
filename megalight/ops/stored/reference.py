"""Decoding in plain torch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 levels of ``nf4`` (appendix E of the paper)."""


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of ``nvfp4``: floating-point numbers of four bits, of which the highest is the sign."""


def decode(data: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """See :func:`megalight.ops.stored.decode`."""
    if form == "int8":
        # One pass over memory: the product reads codes and writes weights.
        found = torch.mul(data, scales[..., None])
    else:
        # A byte is looked up once, for both of its codes.
        found = _pairs(form, scales.dtype, data.device)[data.int()].flatten(-2).mul_(scales[..., None])
    return found.flatten(1).to(dtype)


@lru_cache
def levels_of(dtype: torch.dtype, device: torch.device, form: str = "nf4") -> Tensor:
    """Return the level of each of the 16 codes."""
    levels = LEVELS if form == "nf4" else (*E2M1, *(-level for level in E2M1))
    return torch.tensor(levels, dtype=dtype, device=device)


@lru_cache
def _pairs(form: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two levels of each byte, ``[256, 2]``; the high half comes first."""
    byte = torch.arange(256, device=device)
    return levels_of(dtype, device, form)[torch.stack([byte >> 4, byte & 15], -1)]
