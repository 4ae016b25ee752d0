"""``out += a b^T`` for two quantized matrices: adds 8-bit weight gradients to their main gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from megalight.ops.common import HALF, serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.parameter import put
from megalight.ops.permute import GROUP
from megalight.ops.quantize import Quantized, Scheme
from megalight.ops.scaled_accumulate import cublaslt
from megalight.ops.scaled_mm import SCALED_MM, ScaledMatmulSpec, multiply_into, writes_products
from megalight.registry import Backend, BackendRegistry, choose

# 8-bit GEMMs that add to a main gradient in one kernel, with float32 sums after every block of tokens.


TILE = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "BLOCK_TOKENS": 128, "GROUP": 8, "num_warps": 8, "num_stages": 4}
"""Shape of an output tile, tokens per step, and number of tile rows that share operands in the L2 cache."""


@jit
def _accumulate(
    out: Value, a: Value, b: Value, scale_a: Value, scale_b: Value,
    rows: Value, columns: Value, tokens: Value, stride: Value,
    ADD: constexpr, BLOCK_ROWS: constexpr, BLOCK_COLUMNS: constexpr, BLOCK_TOKENS: constexpr, GROUP: constexpr,
) -> None:  # fmt: skip
    tiles_down = tl.cdiv(rows, BLOCK_ROWS)
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    # Programs are numbered down GROUP rows of tiles before they move across, so that tiles that run at the same time
    # read the same rows of `a` and columns of `b` from the L2 cache.
    first = program // (GROUP * tiles_across) * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    within = program % (GROUP * tiles_across)
    row = (first + within % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (within // height) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    token = tl.arange(0, BLOCK_TOKENS)
    # Rows and columns beyond the edge wrap around: they are computed but not stored, and need no masks.
    left = a + (row % rows).to(tl.int64)[:, None] * tokens + token[None, :]
    right = b + (column % columns).to(tl.int64)[None, :] * tokens + token[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, tokens, BLOCK_TOKENS):
        inside = start + token < tokens
        x = tl.load(left, mask=inside[None, :], other=0.0)
        y = tl.load(right, mask=inside[:, None], other=0.0)
        # Tensor cores accumulate 8-bit GEMMs with fewer bits than float32: move sums to float32 after every block.
        total = tl.dot(x, y, total, max_num_imprecise_acc=BLOCK_TOKENS)
        left += BLOCK_TOKENS
        right += BLOCK_TOKENS
    # One scale per matrix: it factors out of the sum, and is applied once, in float32, before the addition.
    total *= tl.load(scale_a) * tl.load(scale_b)
    # int64: a large weight has more elements than an int32 offset can count.
    target = out + row.to(tl.int64)[:, None] * stride + column[None, :]
    stored = (row < rows)[:, None] & (column < columns)[None, :]
    if ADD:
        total += tl.load(target, mask=stored, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=stored)


def triton_accumulate(out: Tensor, a: Quantized, b: Quantized, write: bool) -> None:
    """Implement :func:`megalight.ops.scaled_accumulate.scaled_accumulate`."""
    (rows, tokens), columns = a.data.shape, len(b.data)
    tiles = cdiv(rows, TILE["BLOCK_ROWS"]) * cdiv(columns, TILE["BLOCK_COLUMNS"])
    if tiles:
        _accumulate[(tiles,)](
            out, a.data.contiguous(), b.data.contiguous(), a.scale, b.scale, rows, columns, tokens, out.stride(0),
            ADD=not write, **TILE,
        )  # fmt: skip


Accumulate: TypeAlias = Callable[[Tensor, Quantized, Quantized, bool], None]
SCALED_ACCUMULATE: BackendRegistry[ScaledMatmulSpec, Accumulate] = BackendRegistry("scaled_accumulate")
REGISTRIES = (SCALED_ACCUMULATE,)
EXAMPLE = ScaledMatmulSpec("cpu", Scheme("e5m2"), Scheme("e4m3"), torch.float32)


def scaled_accumulate(out: Tensor, a: Quantized, b: Quantized, *, write: bool = False, backend: str = "auto") -> None:
    """Add ``a [M, K] x b [N, K]`` to ``out [M, N]``.

    Args:
        out: the matrix to add to.
        a: the left factor.
        b: the right factor, transposed.
        write: whether to overwrite ``out`` with the product instead; its old content is not read.
        backend: name of a backend.

    Raises:
        BackendError: the named backend cannot serve these schemes on this device.
    """
    choose(SCALED_ACCUMULATE, ScaledMatmulSpec(a.data.device.type, a.scheme, b.scheme, out.dtype), backend)(
        out, a, b, write
    )


def _reference(out: Tensor, a: Quantized, b: Quantized, write: bool) -> None:
    # The product is rounded to the dtype of `out` once, and added once: one rounding more than the fused kernels.
    product = choose(SCALED_MM, ScaledMatmulSpec(a.data.device.type, a.scheme, b.scheme, out.dtype), "reference")
    put(out, product(a, b, out.dtype, False, None), write)


def _product_add(out: Tensor, a: Quantized, b: Quantized, write: bool) -> None:
    """Multiply, then add: needs a temporary matrix of the size of ``out``."""
    # A write needs no temporary where the library can put the product straight into `out`.
    if write and multiply_into(out, a, b):
        return
    product = choose(SCALED_MM, ScaledMatmulSpec(a.data.device.type, a.scheme, b.scheme, out.dtype))
    # Other products have been rounded to bf16: a copy of them in the dtype of `out` would hold the same values.
    dtype = out.dtype if writes_products(product) else torch.bfloat16
    put(out, product(a, b, dtype, False, None), write)


def _product_add_why_not(spec: ScaledMatmulSpec) -> str | None:
    return "no fast product serves these schemes here" if SCALED_MM.select(spec).name == "reference" else None


def one_scale_why_not(spec: ScaledMatmulSpec) -> str | None:
    """Return why a kernel for one scale per matrix cannot serve these schemes. The device is not considered."""
    # One scale per matrix factors out of the sum over K; a scale per tile must be applied inside the sum.
    if any(s.tile != (0, 0) or s.scale not in ("fp32", "power") or s.format == "e2m1" for s in (spec.a, spec.b)):
        return "serves 8 bits with one scale per matrix"
    # cuBLASLt has no product of two e5m2 matrices. Recipes need none: at most the gradient is e5m2.
    if spec.a.format == spec.b.format == "e5m2":
        return "multiplies e5m2 by e4m3 only"
    return None


def _cublaslt_why_not(spec: ScaledMatmulSpec) -> str | None:
    if (reason := one_scale_why_not(spec)) is not None:
        return reason
    if spec.dtype != torch.float32:
        return f"adds to float32, not to {spec.dtype}"
    if spec.device != "cuda":
        return f"needs tensors on cuda, not on {spec.device}"
    return cublaslt.why_not(spec.a.format, spec.b.format)


def _triton_why_not(spec: ScaledMatmulSpec) -> str | None:
    if (reason := one_scale_why_not(spec)) is not None:
        return reason
    if spec.dtype not in (torch.float32, *HALF):
        return f"adds to float32, bfloat16 and float16, not to {spec.dtype}"
    if (reason := triton_why_not(spec.device, spec.dtype)) is not None:
        return reason
    # Ada (8.9) has the first tensor cores for 8-bit floats.
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) >= (8, 9) else f"needs a GPU of compute capability 8.9, not {major}.{minor}"


_TRITON = triton_accumulate
SCALED_ACCUMULATE.register(Backend("product_add", _product_add, 20, _product_add_why_not))
SCALED_ACCUMULATE.register(Backend("cublaslt", cublaslt.accumulate, 30, _cublaslt_why_not))
SCALED_ACCUMULATE.register(Backend("triton", _TRITON, 10, _triton_why_not))
SCALED_ACCUMULATE.register(Backend("reference", _reference, 0, serve_all))


def accumulate_groups(
    out: Tensor,
    a: Quantized,
    b: Quantized,
    schemes: tuple[Scheme, Scheme],
    sizes: Sequence[int],
    *,
    write: bool = False,
    backend: str = "auto",
) -> None:
    """Add the product of each group to its matrix of ``out [E, M, N]``.

    Args:
        out: the matrices to add to.
        a: ``[M, L]`` with scales ``[E, M]``: each group of columns begins at a multiple of
            :data:`~megalight.ops.permute.GROUP`, and zeros fill it up to the next.
        b: ``[N, L]`` with scales ``[E, N]``, the same.
        schemes: those of the factors of a single product. With one scale per matrix, the scales of a group are equal.
        sizes: number of columns of each group, without the zeros.
        write: whether to overwrite ``out`` instead; a group without columns then gives zeros.
        backend: name of a backend of :mod:`megalight.ops.scaled_accumulate`.
    """
    add = choose(SCALED_ACCUMULATE, ScaledMatmulSpec(out.device.type, *schemes, out.dtype), backend)
    if add is cublaslt.accumulate:
        cublaslt.accumulate_groups(out, a, b, sizes, GROUP, write)
        return
    start = 0
    for group, size in enumerate(sizes):
        if size:
            # Tensor cores contract multiples of 16 tokens. The quantized values after the last token are zeros.
            columns = slice(start, start + -(-size // 16) * 16)
            left, right = (
                Quantized(quantized.data[:, columns], _own(quantized.scale[group], scheme), scheme)
                for quantized, scheme in zip((a, b), schemes, strict=True)
            )
            add(out[group], left, right, write)
        elif write:
            out[group].zero_()  # the memory holds anything when a step begins
        start += -(-size // GROUP) * GROUP


def _own(scales: Tensor, scheme: Scheme) -> Tensor:
    """Return scales ``[r, 1]`` of rows, or ``[1, 1]`` if the scheme has one for the matrix: all are equal then."""
    return (scales[:1] if scheme.tile == (0, 0) else scales).unsqueeze(1)
