"""Scaled matmul: ``a b^T`` of two quantized matrices, by torch's and cuBLASLt's kernels.

In order: scales of tiles (1 x 128, 128 x 128), microscaling, the public calls, the backends, groups of rows. The
backend ``reference`` multiplies the dequantized values in float64. It serves all schemes on all devices; emulation uses
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import cuda_why_not, serve_all
from megalight.ops.quantize import Quantized, Scheme, quantize
from megalight.registry import Backend, BackendRegistry, choose

BLOCKS = ((1, 128), (128, 128))
RECIPES = {(1, 128): F.ScalingType.BlockWise1x128, (128, 128): F.ScalingType.BlockWise128x128}
BLOCKWISE_ROWS = 16
"""Rows of a matrix with a scale per 1 x 128 must be a multiple of this. cuBLASLt steps by 16 bytes from block to block,
so 4 may do; but the trial before use has tried multiples of 16."""


def scales(q: Quantized) -> Tensor:
    """Return the scales of a matrix in the order of the hardware.

    A product contracts ``K``, of which there are ``L = ceil(K / 128)`` blocks. cuBLASLt reads the scales of all
    rows of one block, then those of the next block (cuBLAS manual, "Element 1D and 128x128 2D Block Scaling for FP8
    Data Types"):

    - 1 x 128: shape ``[rows, L]``, strides ``(1, rows)``;
    - 128 x 128: shape ``[L rounded up to 4, ceil(rows / 128)]``, strides ``(1, L rounded up to 4)``.

    So square tiles lie the other way round: all blocks of ``K`` of one square row, padded to 16 bytes, then the
    next row. torch's older ``torch._scaled_mm`` takes these scales without padding only, and cuBLASLt then reads
    wrong ones wherever ``L`` is no multiple of 4. ``F.scaled_mm`` checks for the shapes and strides above.
    """
    height, blocks = q.scale.shape
    if q.scheme.tile == (1, 128):
        # Not a transposed copy: where a dim has size 1, that may have any stride, which torch refuses.
        return q.scale.new_empty_strided((height, blocks), (1, height)).copy_(q.scale)
    # A copy even without padding: cuBLASLt needs scales at multiples of 16 bytes.
    padded = F.pad(q.scale, (0, -blocks % 4)).contiguous()
    columns = padded.shape[1]
    return padded.as_strided((columns, height), (1, columns))


def filled(q: Quantized) -> Quantized:
    """Return a matrix whose rows are a multiple of :data:`BLOCKWISE_ROWS`, with rows of zeros at its end."""
    missing = -len(q.data) % BLOCKWISE_ROWS
    if not missing or q.scheme.tile != (1, 128):
        return q
    # uint8, because 8-bit floats have no padding kernel.
    data = F.pad(q.data.view(torch.uint8), (0, 0, 0, missing)).view(q.data.dtype)
    return replace(q, data=data, scale=F.pad(q.scale, (0, 0, 0, missing)))


def blockwise_product(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """``a [M, K] x b [N, K] -> [M, N]``, rounded to bf16 by the hardware. Sums are always in full float32."""
    left = filled(a)
    y = F.scaled_mm(
        left.data,
        b.data.t(),
        scales(left),
        RECIPES[a.scheme.tile],
        scales(b),
        RECIPES[b.scheme.tile],
        output_dtype=torch.bfloat16,
    )
    return (y if left is a else y[: len(a.data)]).to(dtype)


MICROSCALED_ROWS, COLUMNS = 128, 4
BYTES = 16
"""The contracted dim of the quantized values must be a multiple of this."""


def tiled(scale: Tensor) -> Tensor:
    """Return scales ``[R, C]`` of one byte each as a flat tensor in the order of the hardware, padded with 0.

    The hardware needs scales in tiles of 128 rows by 4 columns, one tile after the other, row-major. Inside a tile,
    the scale of row ``r`` and column ``c`` has the offset ``16 (r mod 32) + 4 (r div 32) + c`` (cuBLAS manual, "1D
    block scaling factors layout").
    """
    rows, columns = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -columns % COLUMNS, 0, -rows % MICROSCALED_ROWS))
    tiles = padded.view(-1, COLUMNS, 32, padded.shape[1] // COLUMNS, COLUMNS)  # tile row, r div 32, r mod 32, tile, c
    # To: tile row, tile, r mod 32, r div 32, c.
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def _operand(q: Quantized) -> tuple[Tensor, Tensor]:
    """Return quantized values and scales of a matrix; its contracted dim is padded with zeros if needed."""
    height = q.scheme.tile[0]
    scale = q.scale
    if height > 1:
        # The hardware has a scale per row; a square tile's scale is the same for its 16 rows.
        scale = scale.view(torch.uint8).repeat_interleave(height, 0)[: len(q.data)].view(q.scale.dtype)
    data = q.data
    if missing := -data.shape[1] % BYTES:
        data = F.pad(data.view(torch.uint8), (0, missing)).view(q.data.dtype)
    return data, tiled(scale)


def microscaled_product(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """``a [M, K] x b [N, K] -> [M, N]``; the hardware rounds the product to bf16."""
    (left, scale_a), (right, scale_b) = _operand(a), _operand(b)
    y = torch._scaled_mm(left, right.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    if a.global_scale is None or b.global_scale is None:
        return y.to(dtype)
    # The hardware knows block scales only; the float32 scales of the matrices are applied to the product.
    return (y * (a.global_scale * b.global_scale)).to(dtype)


class ScaledMatmulSpec(NamedTuple):
    """A request to a product.

    Attributes:
        device: device type.
        a, b: schemes of the factors.
        dtype: dtype of the result.
        bias: whether a bias is added.
    """

    device: str
    a: Scheme
    b: Scheme
    dtype: torch.dtype
    bias: bool = False


ScaledMM: TypeAlias = Callable[[Quantized, Quantized, torch.dtype, bool, Tensor | None], Tensor]
SCALED_MM: BackendRegistry[ScaledMatmulSpec, ScaledMM] = BackendRegistry("scaled_mm")
REGISTRIES = (SCALED_MM,)
EXAMPLE = ScaledMatmulSpec("cpu", Scheme("e4m3"), Scheme("e4m3"), torch.bfloat16)


def scaled_mm(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``a [M, K] x b [N, K] -> [M, N]``, and a bias on demand.

    Args:
        a: the left factor.
        b: the right factor, transposed.
        dtype: dtype of the result.
        bias: ``[N]`` of the same dtype. Where the product adds it, the sum is rounded once.
        fast: whether sums may have fewer bits than float32, which is good enough for forward passes.
        backend: name of a backend.

    Raises:
        BackendError: the named backend cannot serve these schemes on this device.
    """
    spec = ScaledMatmulSpec(a.data.device.type, a.scheme, b.scheme, dtype, bias is not None)
    return choose(SCALED_MM, spec, backend)(a, b, dtype, fast, bias)


def multiply_into(out: Tensor, a: Quantized, b: Quantized, *, fast: bool = False, backend: str = "auto") -> bool:
    """Write ``a b^T`` into ``out`` if torch can do so without a temporary tensor. Returns whether it did.

    ``fast`` and ``backend`` are those of :func:`scaled_mm`.
    """
    spec = ScaledMatmulSpec(a.data.device.type, a.scheme, b.scheme, out.dtype)
    if not writes_products(choose(SCALED_MM, spec, backend)) or not out.is_contiguous():
        return False
    torch._scaled_mm(
        a.data,
        b.data.t(),
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=out.dtype,
        use_fast_accum=fast,
        out=out,
    )
    return True


def writes_products(product: ScaledMM) -> bool:
    """Return whether a product is written straight into its place: others are rounded to bf16 first."""
    return product is _tensorwise


def _reference(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, bias: Tensor | None) -> Tensor:
    product = a.dequantize() @ b.dequantize().T
    return (product if bias is None else product + bias).to(dtype)


def _then_bias(
    product: Callable[[Quantized, Quantized, torch.dtype, bool], Tensor],
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
) -> Tensor:
    """Add the bias to what a product gives, in a kernel of its own."""
    y = product(a, b, dtype, fast)
    return y if bias is None else y + bias


def _tensorwise(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Tensor:
    return torch._scaled_mm(
        a.data,
        b.data.t(),
        bias=bias,
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _rowwise(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Tensor:
    y = torch._scaled_mm(
        a.data,
        b.data.t(),
        bias=bias,
        scale_a=a.scale.contiguous(),
        scale_b=b.scale.reshape(1, -1).contiguous(),
        out_dtype=torch.bfloat16,  # row-wise scales serve no other dtype
        use_fast_accum=fast,
    )
    return y.to(dtype)


FP32 = ("fp32", "power")


def _torch_why_not(
    spec: ScaledMatmulSpec,
    product: ScaledMM,
    tiles: tuple[tuple[int, int], ...],
    capability: float,
    scales: tuple[str, ...],
) -> str | None:
    schemes = (spec.a, spec.b)
    bits = 4 if scales == ("e4m3",) else 8
    if any(s.scale not in scales or s.tile not in tiles or (s.format == "e2m1") != (bits == 4) for s in schemes):
        return f"serves {bits}-bit tiles {', '.join(map(str, tiles))} (0 means all) with {scales[0]} scales"
    if spec.a.format == spec.b.format == "e5m2":
        return "multiplies e5m2 by e4m3 only"
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"gives bfloat16, float16 or float32, not {spec.dtype}"
    if (reason := cuda_why_not(spec.device)) is not None:
        return reason
    major, minor = torch.cuda.get_device_capability()
    if major + minor / 10 < capability:
        return f"needs a GPU of compute capability {capability}, and this one has {major}.{minor}"
    return _probe(product, spec)


def trial(spec: ScaledMatmulSpec, device: str) -> tuple[Quantized, Quantized, Tensor | None]:
    """Return factors ``[272, 384]`` and ``[144, 384]`` and the bias of a product that finds wrong libraries out.

    It fits into float16.
    """
    # A seed of its own: a probe must not move the random stream of the run.
    generator = torch.Generator().manual_seed(0)
    left, right = (
        # Rows of very different magnitude: a library that mixes up the scales cannot pass. Sizes are no multiples of
        # 128, so padding of scales is tested too.
        quantize((torch.randn(size, 384, generator=generator) * torch.logspace(-3, 1, size)[:, None]).to(device), each)
        for size, each in ((272, spec.a), (144, spec.b))
    )
    # About a third of the product's size: a library that forgets it cannot pass either.
    bias = (torch.randn(144, generator=generator) * 30).to(device, spec.dtype) if spec.bias else None
    return left, right, bias


@lru_cache(maxsize=64)
def _probe(product: ScaledMM, spec: ScaledMatmulSpec) -> str | None:
    """Try the product on this GPU; return why it fails, or None. Some torch releases refuse it or compute it wrong."""
    left, right, bias = trial(spec, "cuda")
    expected = _reference(left, right, torch.float64, False, bias)
    try:
        found = product(left, right, spec.dtype, False, bias).double()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"this torch refuses it here: {str(error).splitlines()[0]}"
    wrong = float((found - expected).norm() / expected.norm())
    # Loose, because fast accumulation and bf16 results are allowed.
    return None if wrong < 1e-2 else f"this torch gives a wrong product here (relative error {wrong:.1e})"


def _register(
    name: str,
    product: ScaledMM,
    priority: int,
    tiles: tuple[tuple[int, int], ...],
    needs: float,
    scales: tuple[str, ...] = FP32,
) -> None:
    why_not = partial(_torch_why_not, product=product, tiles=tiles, capability=needs, scales=scales)
    SCALED_MM.register(Backend(name, product, priority, why_not))


MICROSCALED = partial(_then_bias, microscaled_product)
_register("torch_tensorwise", _tensorwise, 30, ((0, 0),), 8.9)
_register("torch_rowwise", _rowwise, 20, ((1, 0),), 9.0)
# Where the library does not add a bias: to results in float32, for example.
_register("torch_tensorwise_then_bias", partial(_then_bias, _tensorwise), 29, ((0, 0),), 8.9)
_register("torch_rowwise_then_bias", partial(_then_bias, _rowwise), 19, ((1, 0),), 9.0)
_register("torch_blockwise", partial(_then_bias, blockwise_product), 10, BLOCKS, 9.0)
_register("torch_mxfp8", MICROSCALED, 10, ((1, 32),), 10.0, ("e8m0",))
_register("torch_nvfp4", MICROSCALED, 10, ((1, 16), (16, 16)), 10.0, ("e4m3",))
SCALED_MM.register(Backend("reference", _reference, 0, serve_all))


@dataclass(slots=True, eq=False)
class Factors:
    """The right factors ``[N, K]`` of all groups, apart.

    The library has one call per product. What all groups share is looked up once, and views of all groups are made
    by one call, so that the host has little more to do than these calls.

    Attributes:
        data: ``[N, K]`` of each group.
        transposed: views ``[K, N]`` of them.
        scales: of each group: 0-dim with one scale per matrix, else ``[N, 1]``.
        scheme: that of each matrix.
    """

    data: tuple[Tensor, ...]
    transposed: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    scheme: Scheme

    @staticmethod
    def of(stack: Quantized, count: int, scheme: Scheme) -> Factors:
        """Take ``count`` matrices apart that stand one below the other, with a scale for each row.

        Args:
            stack: ``[count * N, K]`` with scales ``[count * N, 1]``, equal in a matrix that has one scale.
            scheme: that of a single matrix.
        """
        height = stack.data.shape[0] // count
        data, scales = stack.data.view(count, height, -1), stack.scale.view(count, height, 1)
        if scheme.tile == (0, 0):
            scales = scales[:, 0, 0]
        return Factors(data.unbind(), data.mT.unbind(), scales.unbind(), scheme)


def multiply_groups(
    out: Tensor,
    rows: Quantized,
    scales: Sequence[Tensor] | None,
    factors: Factors,
    sizes: Sequence[int],
    *,
    fast: bool = False,
    backend: str = "auto",
) -> None:
    """Write the product of each group's rows and its factor, transposed, into its rows of ``out``.

    Rows of ``out`` after the last group are left as they are.

    Args:
        out: ``[R, N]``.
        rows: ``[R, K]`` with the scheme of a single matrix; its scales ``[R, 1]`` serve groups with a scale per row.
        scales: the scale of each group, 0-dim, if it has one. They begin at multiples of 16 bytes, as do the factors'.
        factors: those of the groups.
        sizes: number of rows of each group.
        fast: whether sums may have fewer bits than float32.
        backend: name of a backend of :mod:`megalight.ops.scaled_mm`.
    """
    product = choose(SCALED_MM, ScaledMatmulSpec(out.device.type, rows.scheme, factors.scheme, out.dtype), backend)
    parts = _split(rows.data, sizes)
    targets = _split(out, sizes)
    # A copy: groups begin anywhere, and products need scales at multiples of 16 bytes.
    lines = [part.clone() for part in _split(rows.scale, sizes)[: len(sizes)]] if scales is None else scales
    if writes_products(product):
        for size, target, data, scale, factor, own in zip(
            sizes, targets, parts, lines, factors.transposed, factors.scales, strict=False
        ):
            if size:
                torch._scaled_mm(
                    data, factor, scale_a=scale, scale_b=own, out_dtype=out.dtype, use_fast_accum=fast, out=target
                )
        return
    for size, target, data, scale, factor, own in zip(
        sizes, targets, parts, lines, factors.data, factors.scales, strict=False
    ):
        if size:
            left, right = (
                Quantized(data, scale.view(-1, 1), rows.scheme),
                Quantized(factor, own.view(-1, 1), factors.scheme),
            )
            target.copy_(product(left, right, out.dtype, fast, None))


def _split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return views of all groups, and of the rows after them, in one call."""
    return torch.split_with_sizes(x, [*sizes, x.shape[0] - sum(sizes)])
