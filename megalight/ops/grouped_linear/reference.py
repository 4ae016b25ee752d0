"""Grouped products in plain torch, one expert after the other. Half types are computed in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalight.ops.common import wide
from megalight.ops.parameter import put


def groups(offsets: Tensor, sizes: Sequence[int] | None) -> Iterator[tuple[int, slice]]:
    """Yield each expert's index and its rows. Without ``sizes``, the host waits for the offsets.

    The groups of ``sizes`` follow each other without padding.
    """
    start = 0
    ends = offsets.tolist() if sizes is None else None
    for expert in range(len(offsets)):
        end = ends[expert] if ends is not None else start + sizes[expert]  # type: ignore[index]
        yield expert, slice(start, end)
        start = end


def product(x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, transposed: bool) -> Tensor:
    """Multiply each group with its weight; rows after the last group are zeros."""
    dtype = wide(x.dtype)
    y = x.new_zeros(len(x), weight.shape[1 if transposed else 2])
    for expert, rows in groups(offsets, sizes):
        factor = weight[expert].T if transposed else weight[expert]
        y[rows] = (x[rows].to(dtype) @ factor.to(dtype)).to(x.dtype)
    return y


def accumulate(
    main_grad: Tensor, grad_y: Tensor, x: Tensor, offsets: Tensor, sizes: Sequence[int] | None, write: bool
) -> None:
    """Add each group's ``grad_y^T x``, or write it."""
    dtype = torch.promote_types(wide(grad_y.dtype), main_grad.dtype)
    for expert, rows in groups(offsets, sizes):
        put(main_grad[expert], grad_y[rows].to(dtype).T @ x[rows].to(dtype), write)
