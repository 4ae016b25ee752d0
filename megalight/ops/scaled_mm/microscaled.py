"""Products of matrices with a scale per 16 or 32 elements, as tensor cores from compute capability 10 form them.

Scales lie in memory as the hardware reads them: tiles of 128 rows by 4 columns of scales, end to end by rows of tiles;
inside a tile the scale of row ``r`` and column ``c`` stands at ``16 (r mod 32) + 4 (r div 32) + c`` (cuBLAS manual,
"1D block scaling factors layout").
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.quantize import Quantized

ROWS, COLUMNS = 128, 4
BYTES = 16
"""What the contracted dim of codes must be a multiple of."""


def tiled(scale: Tensor) -> Tensor:
    """Scales ``[R, C]`` of one byte each, flat, in the order of the hardware; what is missing in a tile is 0."""
    rows, columns = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -columns % COLUMNS, 0, -rows % ROWS))
    tiles = padded.view(-1, COLUMNS, 32, padded.shape[1] // COLUMNS, COLUMNS)  # tile row, r div 32, r mod 32, tile, c
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def _operand(q: Quantized) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix, its contracted dim padded with zeros where it must be."""
    height = q.scheme.tile[0]
    scale = q.scale
    if height > 1:
        scale = scale.view(torch.uint8).repeat_interleave(height, 0)[: len(q.data)].view(q.scale.dtype)
    data = q.data
    if missing := -data.shape[1] % BYTES:
        data = F.pad(data.view(torch.uint8), (0, missing)).view(q.data.dtype)
    return data, tiled(scale)


def product(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """``a [M, K] x b [N, K] -> [M, N]``; rounded to bf16 on the way."""
    (left, scale_a), (right, scale_b) = _operand(a), _operand(b)
    y = torch._scaled_mm(left, right.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    if a.global_scale is None or b.global_scale is None:
        return y.to(dtype)
    return (y * (a.global_scale * b.global_scale)).to(dtype)
