"""RMS norm in groups of features with a gate, before the norm (Mamba-2) or after it (Gated DeltaNet)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.common import last_contiguous, num_sms, serve_all, triton_why_not, whole_why_not, wide
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, sigmoid, tl
from megalight.ops.row_indexing import empty_gradient, place_of
from megalight.registry import Backend, BackendRegistry, choose


def reference_gated_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    group_size: int,
    eps: float,
    last: bool = False,
    average: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """See :func:`megalight.ops.gated_norm.gated_norm`."""
    # Squares and their mean lose digits in half precision, and so do products with the gate.
    dtype = wide(y.dtype)
    value, gate = y.to(dtype), F.silu(z.to(dtype))
    groups = (value if last else value * gate).view(*y.shape[:-1], -1, group_size)
    mean = groups.square().mean(-1, keepdim=True)
    normed = groups * torch.rsqrt((mean if average is None else average(mean)) + eps)
    # The weight in the wide dtype, too: the result is rounded once.
    scaled = (normed * weight.to(dtype).view(-1, group_size)).flatten(-2)
    out: Tensor = (scaled * gate if last else scaled).to(y.dtype)
    return out


TILE = 2048
"""Elements that a program handles at once, if groups are smaller than this."""
WARPS_PER_SM = 16
"""Warps of the backward per SM: each program writes its own weight gradients."""


@jit
def _rows(pointer: Value, stride: Value, row: Value, column: Value, inside: Value) -> Value:
    return tl.load(pointer + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@jit
def _forward(
    y: Value, z: Value, weight: Value, out: Value,
    rows: Value, group: Value, y_stride: Value, z_stride: Value, size: Value, eps: Value,
    LAST: constexpr, SHARED: constexpr, ROWS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, BLOCK)
    column = tl.program_id(1) * group + feature
    inside = (row < rows)[:, None] & (feature < group)[None, :]
    gate = _rows(z, z_stride, row, column, inside).to(tl.float32)
    opened = gate * sigmoid(gate)
    value = _rows(y, y_stride, row, column, inside).to(tl.float32)
    if not LAST:
        value *= opened
    scale = tl.rsqrt(tl.sum(value * value, 1) / group + eps)
    factor = tl.load(weight + (feature if SHARED else column), mask=feature < group, other=0.0).to(tl.float32)
    normed = value * scale[:, None] * factor[None, :]
    if LAST:
        normed *= opened
    target = out + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(target, normed.to(out.dtype.element_ty), mask=inside)


@jit
def _backward(
    grad_out: Value, y: Value, z: Value, weight: Value, grad_y: Value, grad_z: Value, grad_weight: Value,
    rows: Value, group: Value, y_stride: Value, z_stride: Value, size: Value, grad_z_stride: Value, eps: Value,
    LAST: constexpr, SHARED: constexpr, ROWS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    feature = tl.arange(0, BLOCK)
    column = tl.program_id(1) * group + feature
    place = feature if SHARED else column
    factor = tl.load(weight + place, mask=feature < group, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    stride = tl.num_programs(0) * ROWS
    row = program * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (feature < group)[None, :]
    next_gate = _rows(z, z_stride, row, column, inside)
    next_value = _rows(y, y_stride, row, column, inside)
    next_grad = _rows(grad_out, size, row, column, inside)
    for start in tl.range(program * ROWS, rows, stride):
        gate, value, grad = next_gate.to(tl.float32), next_value.to(tl.float32), next_grad.to(tl.float32)
        # The next rows are on their way while these are computed.
        row = start + stride + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (feature < group)[None, :]
        next_gate = _rows(z, z_stride, row, column, inside)
        next_value = _rows(y, y_stride, row, column, inside)
        next_grad = _rows(grad_out, size, row, column, inside)
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (feature < group)[None, :]
        share = sigmoid(gate)
        opened = gate * share
        slope = share * (1 + gate * (1 - share))
        inner = value if LAST else value * opened
        scale = tl.rsqrt(tl.sum(inner * inner, 1) / group + eps)[:, None]
        normed = inner * scale
        if LAST:
            grad_gate = grad * normed * factor * slope
            grad *= opened
        sums += grad * normed
        grad *= factor
        # as of an RMS norm
        grad = scale * (grad - normed * (tl.sum(grad * normed, 1) / group)[:, None])
        if not LAST:
            grad_gate = grad * value * slope
            grad *= opened
        target = row.to(tl.int64)[:, None] * size + column[None, :]
        tl.store(grad_y + target, grad.to(grad_y.dtype.element_ty), mask=inside)
        target = row.to(tl.int64)[:, None] * grad_z_stride + column[None, :]
        tl.store(grad_z + target, grad_gate.to(grad_z.dtype.element_ty), mask=inside)
    tl.store(grad_weight + program * size + column, tl.sum(sums, 0), mask=feature < group)


@lru_cache
def _tile(group: int) -> dict[str, int]:
    """Return the rows per program, the block width and the number of warps for groups of ``group`` features."""
    block = max(8, next_power(group))
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(4, rows * block // 256))}


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, weight: Tensor, group: int, eps: float, last: bool) -> Tensor:
        place = place_of(z)
        y, z = last_contiguous(y), last_contiguous(z)
        rows, size = y.shape
        out = torch.empty(rows, size, dtype=y.dtype, device=y.device)
        tile = _tile(group)
        sizes = (rows, group, y.stride(0), z.stride(0), size)
        kind = {"LAST": last, "SHARED": len(weight) < size}
        _forward[(cdiv(rows, tile["ROWS"]), size // group)](y, z, weight, out, *sizes, eps, **kind, **tile)
        ctx.save_for_backward(y, z, weight)
        ctx.group, ctx.eps, ctx.kind, ctx.place = group, eps, kind, place
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight = ctx.saved_tensors
        rows, size = y.shape
        group = ctx.group
        tile = _tile(group)
        programs = num_sms(y.device) * WARPS_PER_SM // tile["num_warps"] * group // size
        programs = max(1, min(programs, cdiv(rows, tile["ROWS"])))
        grad_y = torch.empty(rows, size, dtype=y.dtype, device=y.device)
        grad_z = empty_gradient(z, ctx.place)
        shares = torch.empty(programs, size, dtype=torch.float32, device=y.device)
        sizes = (rows, group, y.stride(0), z.stride(0), size, grad_z.stride(0))
        tensors = (grad_out.contiguous(), y, z, weight, grad_y, grad_z, shares)
        _backward[(programs, size // group)](*tensors, *sizes, ctx.eps, **ctx.kind, **tile)
        grad_weight = shares.view(-1, len(weight)).sum(0)
        return grad_y, grad_z, grad_weight.to(weight.dtype), None, None, None


def triton_gated_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    group_size: int,
    eps: float,
    last: bool = False,
    average: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """See :func:`megalight.ops.gated_norm.gated_norm`. ``average`` is None: ``why_not`` refuses parts of groups.

    The backward computes the gated values and their mean square again: it needs the inputs for its gradients
    anyway.
    """
    out: Tensor = apply(_GatedNorm, y, z, weight, group_size, eps, last)
    return out


class GatedNormSpec(NamedTuple):
    """A request to the norm.

    Attributes:
        device: device type.
        dtype: dtype of the input.
        weight_dtype: dtype of the weight.
        size: number of features of a group.
        divided: the groups are parts of those that are normalized together.
    """

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    size: int
    divided: bool = False


GATED_NORM: BackendRegistry[GatedNormSpec, Callable[..., Tensor]] = BackendRegistry("gated_norm")
REGISTRIES = (GATED_NORM,)
EXAMPLE = GatedNormSpec("cpu", torch.bfloat16, torch.bfloat16, 1024)

MAX_SIZE = 16384
"""Most features of a group that a program of the kernels holds."""


def _triton_why_not(spec: GatedNormSpec) -> str | None:
    if spec.size > MAX_SIZE:
        return f"serves groups of at most {MAX_SIZE} features, not {spec.size}"
    return whole_why_not(spec.divided) or triton_why_not(spec.device, spec.dtype, spec.weight_dtype)


GATED_NORM.register(Backend("triton", triton_gated_norm, 20, _triton_why_not))
GATED_NORM.register(Backend("reference", reference_gated_norm, 0, serve_all))


def check_backend(weight: Tensor, group_size: int, device: str, backend: str, divided: bool) -> None:
    """Do what :func:`megalight.ops.norm.check_backend` does for this op, for groups of ``group_size`` features."""
    choose(GATED_NORM, GatedNormSpec(device, weight.dtype, weight.dtype, group_size, divided), backend)


def gated_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    group_size: int,
    eps: float,
    *,
    last: bool = False,
    average: Callable[[Tensor], Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """``norm(y * silu(z))``, or ``norm(y) * silu(z)``.

    ``norm(u)`` is ``u / sqrt(mean(u^2) + eps) * weight``, the mean over each group of features. Half dtypes are
    computed in float32.

    Args:
        y: ``[T, size]``.
        z: ``[T, size]``. Rows may lie apart in memory.
        weight: ``[size]``, or ``[group_size]`` for one weight of all groups.
        group_size: features of a group, a divisor of ``size``.
        eps: added to the mean square.
        last: whether the gate comes after the norm.
        average: mean squares ``[T, groups, 1]`` of the features here -> those of whole groups, of which these features
            are a part. None: groups are whole.
        backend: a backend's name, or ``auto``.

    Raises:
        BackendError: the named backend cannot serve, for example because of ``average``.
    """
    spec = GatedNormSpec(y.device.type, y.dtype, weight.dtype, group_size, average is not None)
    return choose(GATED_NORM, spec, backend)(y, z, weight, group_size, eps, last, average=average)
