"""Symmetric rank-k update (BLAS's SYRK) of a batch: ``alpha X X^T + beta C + diagonal I``, as Newton-Schulz needs it.

The result is symmetric, so the kernel computes the tiles that touch the lower triangle, and writes each one twice: in
its place, and transposed across the diagonal. That is little more than half of the FLOPs of a GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalight.imports import require
from megalight.ops.common import HALF, serve_all, triton_why_not, wide
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.registry import Backend, BackendRegistry, choose

TILE: dict[str, Any] = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "GROUP": 8, "num_warps": 4, "num_stages": 3}
"""Tile of the result, features per step, and tiles of rows that share columns in the L2 cache.

Two programs share an SM: one computes while the other writes. On an H200, full products of 4096 rows reach 1090 to 1250
TFLOP/s, counted whole, where ``torch.baddbmm`` reaches 670 to 720.
"""
LEAST_ROWS = 2048
"""Rows from which ``auto`` takes the kernel always. ``X X^T`` of 85 matrices of 768 x 2048 takes 320 us, and 270 us by
``torch.bmm``; of 4096 x 4096 it has 1.6 times the speed."""
LEAST_TALL_ROWS = 768
"""Rows from which ``auto`` takes it for many matrices that lie transposed. Blocks of these have longer rows in memory:
``X X^T`` of the same 85 matrices takes 192 us then, and 287 us by ``torch.bmm``."""
MANY_TILES = 1024
"""Least number of tiles for that: an SM of an H200 computes two at a time, so that few tiles leave many SMs idle."""
FEW_TILES = 16
"""Up to so many tiles across, programs for tiles above the diagonal are left out: they would take space on an SM."""
ALIGNED = 8
"""Features of half types in 16 bytes: rows that TMA loads begin at a multiple of them."""


def reference_syrk(x: Tensor, c: Tensor | None, alpha: float, beta: float, diagonal: float = 0.0) -> Tensor:
    """Implement :func:`megalight.ops.syrk.syrk` by GEMMs."""
    if c is not None:
        result = torch.baddbmm(c, x, x.mT, beta=beta, alpha=alpha)
    else:
        result = x @ x.mT if alpha == 1 else (x @ x.mT) * alpha
    if diagonal:
        place = result.diagonal(dim1=-2, dim2=-1)
        torch.add(place.to(wide(place.dtype)), diagonal, out=place)  # a half type would round the factor itself
    return result


@jit
def _syrk(
    rows_of: Value, columns_of: Value, tiles_of_c: Value, tiles_of_out: Value, c: Value, out: Value,
    size: Value, depth: Value, tiles_down: Value, tiles_across: Value, alpha: Value, beta: Value, diagonal: Value,
    ADD: constexpr, TALL: constexpr, EVEN: constexpr, TRIANGLE: constexpr, ROWS: constexpr, COLUMNS: constexpr,
    DEPTH: constexpr, GROUP: constexpr,
) -> None:  # fmt: skip
    program, matrix = tl.program_id(0), tl.program_id(1)
    if TRIANGLE:  # row by row
        tiles_above = ((tl.sqrt(8.0 * program.to(tl.float32) + 1.0) - 1.0) / 2.0 + 0.01).to(tl.int32)
        row, column = tiles_above * ROWS, (program - tiles_above * (tiles_above + 1) // 2) * COLUMNS
    else:
        # Programs are numbered group by group, so that tiles with the same operands run at the same time.
        first = program // (GROUP * tiles_across) * GROUP
        height = tl.minimum(tiles_down - first, GROUP)
        within = program % (GROUP * tiles_across)
        row, column = (first + within % height) * ROWS, within // height * COLUMNS
        if column >= row + ROWS:  # above the diagonal: another program writes it
            return
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # TMA reads zeros beyond the last feature. Rows beyond the matrix are those of the next one: they are not stored.
    for start in range(0, depth, DEPTH):
        if TALL:
            a = rows_of.load([matrix * depth + start, row])
            b = columns_of.load([matrix * depth + start, column])
            total = tl.dot(a.T, b, total)
        else:
            a = rows_of.load([matrix * size + row, start])
            b = columns_of.load([matrix * size + column, start])
            total = tl.dot(a, b.T, total)
    total *= alpha
    if EVEN:  # tiles are square, and none reaches into the next matrix: they are read and written by TMA
        if ADD:
            total += beta * tiles_of_c.load([matrix * size + row, column]).to(tl.float32)
        if row == column:
            below = tl.arange(0, ROWS)[:, None] - tl.arange(0, COLUMNS)[None, :]
            total += tl.where(below == 0, diagonal, 0.0)
            result = total.to(out.dtype.element_ty)
            tiles_of_out.store([matrix * size + row, column], tl.where(below >= 0, result, result.T))
        else:
            result = total.to(out.dtype.element_ty)
            tiles_of_out.store([matrix * size + row, column], result)
            tiles_of_out.store([matrix * size + column, row], result.T)
        return
    row_index, column_index = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    known = (row_index < size)[:, None] & (column_index < size)[None, :]
    begin = matrix.to(tl.int64) * size * size
    place = row_index[:, None] * size + column_index[None, :]
    across = column_index[:, None] * size + row_index[None, :]
    if ADD:
        total += beta * tl.load(c + begin + place, mask=known, other=0.0).to(tl.float32)
    if column + COLUMNS <= row:
        result = total.to(out.dtype.element_ty)
        tl.store(out + begin + place, result, mask=known)
        tl.store(out + begin + across, result.T, mask=known.T)
    else:  # on the diagonal: each element is written once
        total += tl.where(row_index[:, None] == column_index[None, :], diagonal, 0.0)
        result = total.to(out.dtype.element_ty)
        tl.store(out + begin + place, result, mask=known & (row_index[:, None] >= column_index[None, :]))
        tl.store(out + begin + across, result.T, mask=known.T & (row_index[None, :] > column_index[:, None]))


def _lies_transposed(x: Tensor) -> bool:
    return not x.is_contiguous() and x.mT.is_contiguous()


def triton_syrk(
    x: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    diagonal: float = 0.0,
    tile: dict[str, Any] | None = None,
) -> Tensor:
    """Implement :func:`megalight.ops.syrk.syrk`; ``tile`` is another one than :data:`TILE`."""
    tile = tile or TILE
    batch, size, depth = x.shape
    out = x.new_empty(batch, size, size)
    if not out.numel():
        return out
    described = require("triton.tools.tensor_descriptor", "a Triton kernel").TensorDescriptor.from_tensor
    # The transpose of a contiguous matrix is read as it lies, where no block reaches into the next matrix.
    tall = _lies_transposed(x) and not depth % tile["DEPTH"] and not size % ALIGNED
    if tall:
        flat = x.mT.reshape(batch * depth, size)
        blocks = [tile["DEPTH"], tile["ROWS"]], [tile["DEPTH"], tile["COLUMNS"]]
    else:
        x = functional.pad(x, (0, -depth % ALIGNED)).contiguous()
        flat, depth = x.view(batch * size, -1), x.shape[2]
        blocks = [tile["ROWS"], tile["DEPTH"]], [tile["COLUMNS"], tile["DEPTH"]]
    tiles_down, tiles_across = cdiv(size, tile["ROWS"]), cdiv(size, tile["COLUMNS"])
    even = tile["ROWS"] == tile["COLUMNS"] and not size % tile["ROWS"]
    c = None if c is None else c.contiguous()
    read, block = out if c is None else c, [tile["ROWS"], tile["COLUMNS"]]
    triangle = even and tiles_down <= FEW_TILES
    _syrk[(tiles_down * (tiles_down + 1) // 2 if triangle else tiles_down * tiles_across, batch)](
        *(described(flat, block) for block in blocks),
        *(described(each.view(batch * size, size), block) if even else each for each in (read, out)), read, out, size,
        depth, tiles_down, tiles_across, float(alpha), float(beta), float(diagonal),
        ADD=c is not None, TALL=tall, EVEN=even, TRIANGLE=triangle, **tile,
    )  # fmt: skip
    return out


class SyrkSpec(NamedTuple):
    """A request: device type, dtype, rows and columns of a matrix, whether it lies transposed, tiles of the batch."""

    device: str
    dtype: torch.dtype
    size: int
    depth: int
    tall: bool = False
    tiles: int = 0


SYRK: BackendRegistry[SyrkSpec, Callable[..., Tensor]] = BackendRegistry("syrk")
REGISTRIES = (SYRK,)
EXAMPLE = SyrkSpec("cpu", torch.bfloat16, 4096, 4096)


def _triton_why_not(spec: SyrkSpec) -> str | None:
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if (reason := triton_why_not(spec.device, spec.dtype)) is not None:
        return reason
    # Loads by descriptors; tiles are chosen for Hopper.
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 9 else f"needs a GPU of compute capability 9.0, not {major}.{minor}"


def _triton_slower(spec: SyrkSpec) -> str | None:
    if spec.size >= LEAST_ROWS or (spec.tall and spec.size >= LEAST_TALL_ROWS and spec.tiles >= MANY_TILES):
        return None
    return (
        f"is slower for {spec.size} rows, fewer than {LEAST_ROWS}, unless they lie transposed, and the batch has at "
        f"least {LEAST_TALL_ROWS} rows in {MANY_TILES} tiles"
    )


SYRK.register(Backend("triton", triton_syrk, 20, _triton_why_not, slower=_triton_slower))
SYRK.register(Backend("reference", reference_syrk, 0, serve_all))


def syrk(
    x: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Return ``alpha X X^T + beta C + diagonal I`` for each matrix of a batch; half types add in float32.

    Args:
        x: ``[B, m, n]``.
        c: ``[B, m, m]``, symmetric: kernels may read one triangle of it. None: nothing is added.
        alpha, beta, diagonal: factors.
        backend: a backend's name, or ``auto``.

    Returns:
        ``[B, m, m]``, in the dtype of ``x``.

    Raises:
        BackendError: the named backend cannot serve this dtype on this device.
    """
    batch, size, depth = x.shape
    tiles = cdiv(size, TILE["ROWS"])
    spec = SyrkSpec(x.device.type, x.dtype, size, depth, _lies_transposed(x), batch * tiles * (tiles + 1) // 2)
    return choose(SYRK, spec, backend)(x, c, alpha, beta, diagonal)
