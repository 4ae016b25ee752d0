"""One Adam step with torch's fused kernels on moments or gradients in fewer bits: piece by piece.

A piece is widened, updated and rounded back while it is in the cache, and takes little memory. This is the step of
parameters in host memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megalight.ops.adam import narrow, native

PIECE = 1 << 20
"""Elements. Each thread of a host of 16 cores then works on 256 KiB per tensor, and finds them in its own cache."""


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
    flat = [tensor.view(-1) for tensor in (param, grad, exp_avg, exp_avg_sq)]
    for start in range(0, param.numel(), PIECE):
        own, gradient, *moments = (tensor[start : start + PIECE] for tensor in flat)
        blocks = slice(start // narrow.BLOCK, (start + PIECE) // narrow.BLOCK)
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
            out=None if out is None else out.view(-1)[start : start + PIECE],
            **options,
        )
        for second, (moment, each, values) in enumerate(zip(moments, shared, wide, strict=True)):
            if values is not moment:
                narrow.write(moment, each, values, bool(second), step)
