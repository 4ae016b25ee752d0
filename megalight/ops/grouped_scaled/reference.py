"""Grouped products of codes in plain torch, one group after the other, in float64. The host waits for the offsets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.grouped_linear.reference import groups
from megalight.ops.grouped_scaled.layout import GROUP, most_columns
from megalight.ops.parameter import put
from megalight.ops.quantize.reference import quantize, tile_amax
from megalight.ops.quantize.types import Quantized, Scheme


def columns(x: Tensor, scheme: Scheme, offsets: Tensor | None, amax: Tensor | None) -> Quantized:
    """Implement ``columns_of_groups``; with a stack of matrices and no offsets, ``columns_of_stack``."""
    if offsets is None:
        return quantize(x.mT.flatten(0, 1).contiguous(), scheme, None if amax is None else amax.reshape(-1, 1))
    scale = torch.empty(len(offsets), x.shape[1], device=x.device)
    parts = []
    for group, rows in groups(offsets, None):
        # A group without rows has magnitudes of zero.
        largest = tile_amax(F.pad(x[rows].t(), (0, 1)), scheme.tile) if amax is None else amax[group].unsqueeze(1)
        part = quantize(F.pad(x[rows].t(), (0, -(rows.stop - rows.start) % GROUP)), scheme, largest)
        scale[group] = part.scale[:, 0]
        parts.append(part.data.view(torch.uint8))
    codes = torch.cat(parts, 1)
    missing = most_columns(len(x), len(offsets)) - codes.shape[1]
    return Quantized(F.pad(codes, (0, missing)).view(part.data.dtype), scale, scheme)


def product(x: Quantized, weight: Quantized, offsets: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Implement ``product``; rows after the last group are zeros."""
    rows, matrices = x.dequantize(), weight.dequantize().view(len(offsets), -1, weight.data.shape[1])
    y = torch.zeros(len(rows), matrices.shape[1], dtype=dtype, device=rows.device)
    for group, part in groups(offsets, None):
        y[part] = (rows[part] @ matrices[group].T).to(dtype)
    return y


def accumulate(main_grad: Tensor, grad: Quantized, x: Quantized, offsets: Tensor, write: bool) -> None:
    """Implement ``add_weight_gradient``."""
    start = 0
    for group, rows in groups(offsets, None):
        # To 16 tokens as products of one matrix pad them: sums then have the same terms.
        part = slice(start, start + (rows.stop - rows.start + 15) // 16 * 16)
        left, right = (q.data[:, part].double() * q.scale[group].double().unsqueeze(1) for q in (grad, x))
        put(main_grad[group], (left @ right.T).to(main_grad.dtype), write)
        start += (rows.stop - rows.start + GROUP - 1) // GROUP * GROUP
