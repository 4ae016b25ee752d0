"""Decoding in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.stored.reference import levels_of

BLOCK = 4096
"""Elements that a program decodes."""


@jit
def _decode(
    data: Value,
    scales: Value,
    levels: Value,
    out: Value,
    size: Value,
    FEATURES: constexpr,
    HALVES: constexpr,
    BLOCK: constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < size
    scale = tl.load(scales + place // FEATURES, mask=here, other=0.0).to(tl.float32)
    if HALVES:
        byte = tl.load(data + place // 2, mask=here, other=0).to(tl.int32)
        # The high half of a byte comes first.
        code = (byte >> (4 * (1 - place % 2)).to(tl.int32)) & 15
        value = tl.load(levels + code).to(tl.float32)
    else:
        value = tl.load(data + place, mask=here, other=0).to(tl.float32)
    tl.store(out + place, (value * scale).to(out.dtype.element_ty), mask=here)


def decode(data: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """See :func:`megalight.ops.stored.decode`."""
    halves = form != "int8"
    features = data.shape[2] * (2 if halves else 1)
    out = torch.empty(data.shape[0], data.shape[1] * features, dtype=dtype, device=data.device)
    _decode[(cdiv(out.numel(), BLOCK),)](
        data,
        scales,
        levels_of(scales.dtype, data.device, form if halves else "nf4"),
        out,
        out.numel(),
        FEATURES=features,
        HALVES=halves,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out
