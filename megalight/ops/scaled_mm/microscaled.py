"""Products of matrices with a scale per 16 or 32 elements, on tensor cores of compute capability 10 and above.

The hardware needs scales in tiles of 128 rows by 4 columns, one tile after the other, row-major. Inside a tile, the
scale of row ``r`` and column ``c`` has the offset ``16 (r mod 32) + 4 (r div 32) + c`` (cuBLAS manual, "1D block
scaling factors layout").
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.quantize import Quantized

ROWS, COLUMNS = 128, 4
BYTES = 16
"""The contracted dim of the codes must be a multiple of this."""


def tiled(scale: Tensor) -> Tensor:
    """Return scales ``[R, C]`` of one byte each as a flat tensor in the order of the hardware, padded with 0."""
    rows, columns = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -columns % COLUMNS, 0, -rows % ROWS))
    tiles = padded.view(-1, COLUMNS, 32, padded.shape[1] // COLUMNS, COLUMNS)  # tile row, r div 32, r mod 32, tile, c
    # To: tile row, tile, r mod 32, r div 32, c.
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def _operand(q: Quantized) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix; its contracted dim is padded with zeros if needed."""
    height = q.scheme.tile[0]
    scale = q.scale
    if height > 1:
        # The hardware has a scale per row; a square tile's scale is the same for its 16 rows.
        scale = scale.view(torch.uint8).repeat_interleave(height, 0)[: len(q.data)].view(q.scale.dtype)
    data = q.data
    if missing := -data.shape[1] % BYTES:
        data = F.pad(data.view(torch.uint8), (0, missing)).view(q.data.dtype)
    return data, tiled(scale)


def product(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """``a [M, K] x b [N, K] -> [M, N]``; the hardware rounds the product to bf16."""
    (left, scale_a), (right, scale_b) = _operand(a), _operand(b)
    y = torch._scaled_mm(left, right.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    if a.global_scale is None or b.global_scale is None:
        return y.to(dtype)
    # The hardware knows block scales only; the float32 scales of the matrices are applied to the product.
    return (y * (a.global_scale * b.global_scale)).to(dtype)
