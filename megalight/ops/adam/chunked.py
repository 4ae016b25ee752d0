"""One Adam step with torch's fused kernels, piece by piece: for hosts, and for moments or gradients in fewer bits.

A piece is scaled or widened, updated, and rounded while it is in the caches of the cores. Whole tensors would take the
memory of a scaled gradient, which the host sets to zero in each step, and one more pass for every such change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.adam import narrow, native

SHARE = 1 << 17
"""Elements of a piece for each thread: 512 KiB per tensor, so that those of a step about fit into a core's cache."""


def piece() -> int:
    """Return the number of elements of a piece, a multiple of :data:`.narrow.BLOCK`."""
    return SHARE * torch.get_num_threads()


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: float | Tensor,
    out: Tensor | None = None,
    exponents: tuple[Tensor | None, Tensor | None] = (None, None),
    **options: Any,
) -> None:
    """Update pieces in turn; see :func:`megalight.ops.adam.adam_step`."""
    size = piece()
    flat = [tensor.view(-1) for tensor in (param, grad, exp_avg, exp_avg_sq)]
    for start in range(0, param.numel(), size):
        own, gradient, *moments = (tensor[start : start + size] for tensor in flat)
        blocks = slice(start // narrow.BLOCK, (start + size) // narrow.BLOCK)
        shared = [None if each is None else each[blocks] for each in exponents]
        wide = [
            narrow.read(moment, each, bool(second)).to(param.dtype)
            for second, (moment, each) in enumerate(zip(moments, shared, strict=True))
        ]
        native.adam_step(
            own,
            gradient.to(param.dtype),
            *wide,
            step=step,
            out=None if out is None else out.view(-1)[start : start + size],
            **options,
        )
        for second, (moment, each, values) in enumerate(zip(moments, shared, wide, strict=True)):
            if values is not moment:
                narrow.write(moment, each, values, bool(second), step)
