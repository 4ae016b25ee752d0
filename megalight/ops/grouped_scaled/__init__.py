"""Grouped GEMMs of 8-bit values: the products of all experts of a stack at once, with a scale per row and column.

One scale per matrix is a scale per row whose values repeat. So these products serve both kinds of scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import HALF, lazy, serve_all, triton_why_not
from megalight.ops.grouped_linear.backends import groups
from megalight.ops.parameter import put
from megalight.ops.permute import GROUP, most_columns
from megalight.ops.quantize import quantize, tile_amax
from megalight.ops.quantize.formats import Quantized, Scheme
from megalight.registry import Backend, BackendRegistry, choose


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
    data = torch.cat(parts, 1)
    missing = most_columns(len(x), len(offsets)) - data.shape[1]
    return Quantized(F.pad(data, (0, missing)).view(part.data.dtype), scale, scheme)


def reference_product(x: Quantized, weight: Quantized, offsets: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Implement ``reference_product``; rows after the last group are zeros."""
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


LINE = (1, 0)
"""The tile of all quantized values here: a scale for each row of what is contracted."""


class GroupedScaledSpec(NamedTuple):
    """A request: device type, schemes of both factors, and dtype of the activations.

    For a cast, both schemes are that of the quantized values.
    """

    device: str
    a: Scheme
    b: Scheme
    dtype: torch.dtype


COLUMNS: BackendRegistry[GroupedScaledSpec, Callable[..., Quantized]] = BackendRegistry("grouped_columns")
PRODUCT: BackendRegistry[GroupedScaledSpec, Callable[..., Tensor]] = BackendRegistry("grouped_scaled_product")
WGRAD: BackendRegistry[GroupedScaledSpec, Callable[..., None]] = BackendRegistry("grouped_scaled_weight_gradient")
REGISTRIES: tuple[BackendRegistry[GroupedScaledSpec, Any], ...] = (COLUMNS, PRODUCT, WGRAD)
EXAMPLE = GroupedScaledSpec("cpu", Scheme("e4m3", LINE), Scheme("e4m3", LINE), torch.bfloat16)


def columns_of_groups(
    x: Tensor, scheme: Scheme, offsets: Tensor, amax: Tensor | None = None, backend: str = "auto"
) -> Quantized:
    """Quantize the transpose of each group of ``x [R, F]``, for a product that contracts tokens.

    Args:
        x: rows by group; those after the last group are not read.
        scheme: a scheme with the tile :data:`LINE`.
        offsets: ``[E]`` int32 on the device: the end of each group.
        amax: ``[E, F]``: the largest magnitudes that the scales must cover. None: those of the values.

    Returns:
        quantized values ``[F, L]`` with scales ``[E, F]``. Each group begins at a multiple of :data:`GROUP` columns,
        and is filled up with zeros to the next. ``L`` is the most that can be needed; the columns after the last group
        are not set.
    """
    cast: Quantized = choose(COLUMNS, GroupedScaledSpec(x.device.type, scheme, scheme, x.dtype), backend)(
        x, scheme, offsets, amax
    )
    return cast


def columns_of_stack(weight: Tensor, scheme: Scheme, amax: Tensor | None = None, backend: str = "auto") -> Quantized:
    """Quantize the transpose of each matrix of ``weight [E, out, in]``.

    ``scheme`` and ``amax [E, in]`` are those of :func:`columns_of_groups`.

    Returns:
        quantized values ``[E * in, out]`` with scales ``[E * in, 1]``.
    """
    spec = GroupedScaledSpec(weight.device.type, scheme, scheme, weight.dtype)
    cast: Quantized = choose(COLUMNS, spec, backend)(weight, scheme, None, amax)
    return cast


def product(
    x: Quantized,
    weight: Quantized,
    offsets: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``[R, K] x [E * N, K] -> [R, N]``: the rows of group ``e`` times the matrix ``e``, transposed.

    Rows after the last group get any values.

    Args:
        x: quantized values with scales ``[R, 1]``.
        weight: quantized values with scales ``[E * N, 1]``.
        offsets: ``[E]`` int32 on the device: the end of each group.
        dtype: dtype of the result.
        fast: whether sums may have fewer bits than float32.
    """
    spec = GroupedScaledSpec(x.data.device.type, x.scheme, weight.scheme, dtype)
    y: Tensor = choose(PRODUCT, spec, backend)(x, weight, offsets, dtype, fast)
    return y


def add_weight_gradient(
    main_grad: Tensor,
    grad: Quantized,
    x: Quantized,
    offsets: Tensor,
    write: bool,
    backend: str = "auto",
) -> None:
    """Add the product of two casts by :func:`columns_of_groups` to ``main_grad [E, out, in]``, group by group.

    Args:
        grad: ``[out, L]``.
        x: ``[in, L]``.
        offsets: those of both casts.
        write: overwrite instead: zeros for groups without rows.
    """
    spec = GroupedScaledSpec(main_grad.device.type, grad.scheme, x.scheme, main_grad.dtype)
    choose(WGRAD, spec, backend)(main_grad, grad, x, offsets, write)


def why_not(spec: GroupedScaledSpec) -> str | None:
    """Return why there are no fast products for these schemes here, or None."""
    for registry in REGISTRIES:
        if registry.select(spec).name == "reference":
            return "; ".join(f"{row.name}: {reason}" for row, reason in registry.table(spec) if reason is not None)
    return None


def scheme_why_not(scheme: Scheme) -> str | None:
    """Return why quantized values of a scheme cannot be grouped, or None."""
    if scheme.tile in ((0, 0), LINE) and scheme.scale in ("fp32", "power") and scheme.format != "e2m1":
        return None
    return "serves 8 bits with one scale per matrix, row or column: smaller tiles must be scaled inside the sum"


def _triton_why_not(spec: GroupedScaledSpec) -> str | None:
    for scheme in (spec.a, spec.b):
        if (reason := scheme_why_not(scheme)) is not None:
            return reason
    if spec.dtype not in (torch.float32, *HALF):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    if (reason := triton_why_not(spec.device, spec.dtype)) is not None:
        return reason
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 9 else f"needs a GPU of compute capability 9.0, not {major}.{minor}"


_TRITON = "megalight.ops.grouped_scaled.triton"
COLUMNS.register(Backend("triton", lazy(_TRITON, "columns"), 10, _triton_why_not))
PRODUCT.register(Backend("triton", lazy(_TRITON, "product"), 10, _triton_why_not))
WGRAD.register(Backend("triton", lazy(_TRITON, "accumulate"), 10, _triton_why_not))
COLUMNS.register(Backend("reference", columns, 0, serve_all))
PRODUCT.register(Backend("reference", reference_product, 0, serve_all))
WGRAD.register(Backend("reference", accumulate, 0, serve_all))
