"""The passes over memory of an optimizer of whole matrices: momentum, norms of matrices, and weights.

Momentum and weights take one pass each on a GPU. In eager torch, both together read and write 70 bytes for each
parameter instead of 26. A division by the norm takes two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import serve_all, triton_why_not, wide
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.registry import Backend, BackendRegistry, choose

BLOCK = 1024
"""Elements of a program: eight per thread with four warps."""
NORM_BLOCK = 8192
"""Elements of a matrix that a program reads at a time."""
MOST_PARTS = 512
"""The largest number of sums of squares of a matrix, which every program adds up once more."""


def reference_momentum(
    out: Tensor, gradient: Tensor, buffer: Tensor, momentum: float, nesterov: bool, scale: Tensor | None
) -> None:
    """Implement :func:`megalight.ops.momentum.momentum_step`."""
    gradient = (gradient if scale is None else gradient * scale).to(buffer.dtype)
    buffer.lerp_(gradient, 1 - momentum)
    out.copy_(gradient.lerp(buffer, momentum) if nesterov else buffer)


def reference_decayed(param: Tensor, update: Tensor, lr: float | Tensor, decay: float, out: Tensor | None) -> None:
    """Implement :func:`megalight.ops.momentum.decayed_step`."""
    update = update.to(param.dtype)
    param.mul_(1 - lr * decay)
    if isinstance(lr, Tensor):
        param.sub_(update * lr)
    else:
        param.sub_(update, alpha=lr)
    if out is not None:
        out.copy_(param)


def reference_normalized(x: Tensor, eps: float) -> Tensor:
    """Implement :func:`megalight.ops.momentum.normalized`."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide(x.dtype))
    return (x / norm.clamp(min=eps)).to(x.dtype)


@jit
def _momentum(
    out: Value, gradient: Value, buffer: Value, scale: Value,
    n: Value, momentum: Value, rest: Value,
    SCALED: constexpr, NESTEROV: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    g = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        g *= tl.load(scale)
    m = tl.load(buffer + index, mask=inside, other=0.0)
    m += rest * (g - m)
    tl.store(buffer + index, m, mask=inside)
    if NESTEROV:
        m = g + momentum * (m - g)
    tl.store(out + index, m.to(out.dtype.element_ty), mask=inside)


def triton_momentum(
    out: Tensor, gradient: Tensor, buffer: Tensor, momentum: float, nesterov: bool, scale: Tensor | None
) -> None:
    """Implement :func:`megalight.ops.momentum.momentum_step`."""
    if n := out.numel():
        _momentum[(cdiv(n, BLOCK),)](
            *(out, gradient, buffer, gradient if scale is None else scale, n, float(momentum), float(1 - momentum)),
            SCALED=scale is not None, NESTEROV=nesterov, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


@jit
def _decayed(
    param: Value, update: Value, out: Value, rates: Value,
    n: Value, lr: Value, decay: Value,
    COPY: constexpr, ON_DEVICE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    if ON_DEVICE:  # so that a captured step follows later changes
        lr = tl.load(rates).to(tl.float32)
    p = tl.load(param + index, mask=inside, other=0.0).to(tl.float32)
    p = p * (1.0 - lr * decay) - lr * tl.load(update + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(param + index, p.to(param.dtype.element_ty), mask=inside)
    if COPY:
        tl.store(out + index, p.to(out.dtype.element_ty), mask=inside)


def triton_decayed(param: Tensor, update: Tensor, lr: float | Tensor, decay: float, out: Tensor | None) -> None:
    """Implement :func:`megalight.ops.momentum.decayed_step`."""
    on_device = isinstance(lr, Tensor)
    if n := param.numel():
        _decayed[(cdiv(n, BLOCK),)](
            *(param, update, param if out is None else out, lr if on_device else param, n),
            *(0.0 if on_device else float(lr), float(decay)),
            COPY=out is not None, ON_DEVICE=on_device, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


@jit
def _squares(x: Value, sums: Value, n: Value, blocks: Value, BLOCK: constexpr) -> None:
    part, matrix = tl.program_id(0), tl.program_id(1)
    first = part * blocks * BLOCK
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(blocks):
        index = first + block * BLOCK + tl.arange(0, BLOCK)
        each = tl.load(x + matrix.to(tl.int64) * n + index, mask=index < n, other=0.0).to(tl.float32)
        total += each * each
    tl.store(sums + matrix * tl.num_programs(0) + part, tl.sum(total, 0))


@jit
def _divided(
    x: Value, sums: Value, out: Value, n: Value, blocks: Value, eps: Value, PARTS: constexpr, BLOCK: constexpr
) -> None:
    part, matrix, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    every = tl.arange(0, PARTS)
    square = tl.sum(tl.load(sums + matrix * parts + every, mask=every < parts, other=0.0), 0)
    factor = 1.0 / tl.maximum(tl.sqrt(square), eps)
    first = part * blocks * BLOCK
    for block in range(blocks):
        index = first + block * BLOCK + tl.arange(0, BLOCK)
        place = matrix.to(tl.int64) * n + index
        each = tl.load(x + place, mask=index < n, other=0.0).to(tl.float32) * factor
        tl.store(out + place, each.to(out.dtype.element_ty), mask=index < n)


def triton_normalized(x: Tensor, eps: float) -> Tensor:
    """Implement :func:`megalight.ops.momentum.normalized`."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    n = x.shape[1] * x.shape[2]
    # Each program sums a part of a matrix, and the next kernel all parts of it, in the same order always.
    blocks = cdiv(n, MOST_PARTS * NORM_BLOCK)
    parts = cdiv(n, blocks * NORM_BLOCK)
    sums = torch.empty(len(x), parts, dtype=torch.float32, device=x.device)
    options = {"BLOCK": NORM_BLOCK, "num_warps": 8}
    _squares[(parts, len(x))](x, sums, n, blocks, **options)
    _divided[(parts, len(x))](x, sums, out, n, blocks, float(eps), PARTS=MOST_PARTS, **options)
    return out


class MomentumSpec(NamedTuple):
    """A request: device type, dtype of gradients or updates, dtype of what is changed, whether all are contiguous."""

    device: str
    dtype: torch.dtype
    state_dtype: torch.dtype
    contiguous: bool = True


MOMENTUM: BackendRegistry[MomentumSpec, Callable[..., None]] = BackendRegistry("momentum_step")
DECAYED: BackendRegistry[MomentumSpec, Callable[..., None]] = BackendRegistry("decayed_step")
NORMALIZED: BackendRegistry[MomentumSpec, Callable[..., Tensor]] = BackendRegistry("normalized")
REGISTRIES = (MOMENTUM, DECAYED, NORMALIZED)
EXAMPLE = MomentumSpec("cpu", torch.float32, torch.float32)


def _triton_why_not(spec: MomentumSpec) -> str | None:
    if not spec.contiguous:
        return "needs contiguous tensors"
    return triton_why_not(spec.device, spec.dtype, spec.state_dtype)


MOMENTUM.register(Backend("triton", triton_momentum, 20, _triton_why_not))
MOMENTUM.register(Backend("reference", reference_momentum, 0, serve_all))
DECAYED.register(Backend("triton", triton_decayed, 20, _triton_why_not))
DECAYED.register(Backend("reference", reference_decayed, 0, serve_all))
NORMALIZED.register(Backend("triton", triton_normalized, 20, _triton_why_not))
NORMALIZED.register(Backend("reference", reference_normalized, 0, serve_all))


def momentum_step(
    out: Tensor, gradient: Tensor, buffer: Tensor, *, momentum: float, nesterov: bool, scale: Tensor | None = None
) -> None:
    """Update momentum, and write what is to be orthogonalized.

    ``buffer = momentum buffer + (1 - momentum) g``, with ``g = scale gradient``; ``out`` is the same of ``buffer`` and
    ``g`` again (Nesterov), or ``buffer``.

    Args:
        out: ``[n]``.
        gradient: ``[n]``.
        buffer: ``[n]``, float32 or wider.
        momentum: decay.
        nesterov: whether ``out`` looks ahead.
        scale: 0-dim tensor on the device.
    """
    flat = all(each.is_contiguous() for each in (out, gradient, buffer))
    choose(MOMENTUM, MomentumSpec(out.device.type, gradient.dtype, buffer.dtype, flat))(
        out, gradient, buffer, momentum, nesterov, scale
    )


def decayed_step(
    param: Tensor, update: Tensor, *, lr: float | Tensor, weight_decay: float, out: Tensor | None = None
) -> None:
    """Subtract ``lr (weight_decay param + update)`` from a parameter (decoupled weight decay).

    Args:
        param: ``[n]``.
        update: ``[n]``.
        lr: learning rate; a tensor must be on the device.
        weight_decay: decay coefficient.
        out: ``[n]``, gets the new values, too, in its dtype.
    """
    flat = all(each is None or each.is_contiguous() for each in (param, update, out))
    spec = MomentumSpec(param.device.type, update.dtype, param.dtype, flat)
    choose(DECAYED, spec)(param, update, lr, weight_decay, out)


def normalized(x: Tensor, eps: float) -> Tensor:
    """Divide each matrix of a batch by its Frobenius norm, or by ``eps`` where that is larger.

    Args:
        x: ``[B, m, n]``.
        eps: least divisor.

    Returns:
        ``[B, m, n]``; squares of half types are added in float32.
    """
    spec = MomentumSpec(x.device.type, x.dtype, x.dtype, x.is_contiguous())
    found: Tensor = choose(NORMALIZED, spec)(x, eps)
    return found
