"""Quantization of flat float32 memory into flat memory of 8 bits: the part of a weight that one rank updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.common import serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize import TINY, amax_of, multiplier
from megalight.ops.quantize.amax_history import record_largest
from megalight.ops.quantize.formats import DTYPES, LARGEST, Scheme, to_fp8
from megalight.registry import Backend, BackendRegistry, choose

BLOCK = 4096
"""Elements of a program."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@jit
def scaled(value: Value, amax: Value, LARGEST: constexpr, SMALLEST: constexpr, POWER: constexpr) -> Value:
    """Scale and clamp float32 values as the cast of matrices does, so that quantized values are equal bit by bit."""
    factor = tl.div_rn(LARGEST, tl.maximum(tl.load(amax), SMALLEST))
    if POWER:
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    value = value * factor
    value = tl.where(value > LARGEST, LARGEST, value)  # unlike minimum and maximum, comparisons keep NaN
    return tl.where(value < -LARGEST, -LARGEST, value)


@jit
def _cast_flat(
    x: Value, out: Value, amax: Value, largest: Value, numel: Value,
    TELL: constexpr, ROUNDED: constexpr, LARGEST: constexpr, SMALLEST: constexpr, POWER: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    value = tl.load(x + at, mask=inside, other=0.0).to(ROUNDED).to(tl.float32)
    if TELL:
        # As integers, non-negative floats have the same order, and a maximum of integers needs no case for signs.
        tl.atomic_max(largest, tl.max(tl.abs(value), 0).to(tl.int32, bitcast=True), sem="relaxed")
    value = scaled(value, amax, LARGEST, SMALLEST, POWER)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def triton_cast_flat(
    out: Tensor, x: Tensor, scheme: Scheme, amax: Tensor, rounded: torch.dtype, largest: Tensor | None = None
) -> None:
    """Implement :func:`megalight.ops.cast_flat.cast_flat`."""
    if numel := x.numel():
        _cast_flat[(cdiv(numel, BLOCK),)](
            x, out, amax, amax if largest is None else largest.view(torch.int32), numel,
            TELL=largest is not None, ROUNDED=TYPES[rounded], LARGEST=LARGEST[scheme.format], SMALLEST=TINY,
            POWER=scheme.scale == "power", BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


class CastFlatSpec(NamedTuple):
    """A request.

    Attributes:
        device: device type of the values.
        dtype: dtype of the values.
        rounded: dtype to which they are rounded first.
        stays: whether the quantized values lie on the same device.
    """

    device: str
    dtype: torch.dtype
    rounded: torch.dtype
    stays: bool = True


CastFlat: TypeAlias = Callable[[Tensor, Tensor, Scheme, Tensor, torch.dtype, Tensor | None], None]
CAST_FLAT: BackendRegistry[CastFlatSpec, CastFlat] = BackendRegistry("cast_flat")
REGISTRIES = (CAST_FLAT,)
EXAMPLE = CastFlatSpec("cpu", torch.float32, torch.bfloat16)


def cast_flat(
    out: Tensor,
    x: Tensor,
    scheme: Scheme,
    amax: Tensor,
    rounded: torch.dtype,
    *,
    largest: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write ``x [n]``, quantized, into ``out [n]``, bytes or of the scheme's 8-bit dtype. Memory for copies is spared.

    Args:
        out: contiguous; it may be on another device.
        x: the values, contiguous.
        scheme: of 8 bits, with one scale for the matrix of which ``x`` is a part.
        amax: largest magnitude that the scale must cover, 0-dim float32, on the device of ``x``.
        rounded: dtype to which values are rounded before; that of ``x`` changes nothing.
        largest: 0-dim float32 on the device of ``x``, not negative. It is raised to the largest magnitude of the
            rounded values, if that is larger; on a GPU without a pass of its own, and NaN is ignored there.
        backend: name of a backend.

    Raises:
        BackendError: the named backend cannot serve this.
    """
    spec = CastFlatSpec(x.device.type, x.dtype, rounded, x.device == out.device)
    choose(CAST_FLAT, spec, backend)(out.view(DTYPES[scheme.format]), x, scheme, amax, rounded, largest)


def _reference(
    out: Tensor, x: Tensor, scheme: Scheme, amax: Tensor, rounded: torch.dtype, largest: Tensor | None
) -> None:
    factor = multiplier(amax, LARGEST[scheme.format], scheme.scale == "power")
    values = x.to(rounded).float()
    if largest is not None:
        record_largest(largest, amax_of(values))
    data = to_fp8(values * factor, scheme.format)
    # As bytes: in-place copies are not available for all 8-bit dtypes.
    out.view(torch.uint8).copy_(data.view(torch.uint8))


def _triton_why_not(spec: CastFlatSpec) -> str | None:
    if not spec.stays:
        return "writes quantized values on the device of the values only"
    return triton_why_not(spec.device, spec.dtype, spec.rounded)


CAST_FLAT.register(Backend("triton", triton_cast_flat, 10, _triton_why_not))
CAST_FLAT.register(Backend("reference", _reference, 0, serve_all))
