"""The element-wise passes of an optimizer of whole matrices: momentum before they travel, weights when they are back.

Each is one pass over memory on a GPU. In eager torch, both together read and write 70 bytes for each parameter instead
of 26.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.registry import Backend, BackendRegistry, remembered

BLOCK = 1024
"""Elements of a program: eight per thread with four warps."""


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


@jit
def _momentum(
    out: Value,
    gradient: Value,
    buffer: Value,
    scale: Value,
    n: Value,
    momentum: Value,
    rest: Value,
    SCALED: constexpr,
    NESTEROV: constexpr,
    BLOCK: constexpr,
) -> None:
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
            SCALED=scale is not None,
            NESTEROV=nesterov,
            BLOCK=BLOCK,
            num_warps=4,
        )


@jit
def _decayed(
    param: Value,
    update: Value,
    out: Value,
    rates: Value,
    n: Value,
    lr: Value,
    decay: Value,
    COPY: constexpr,
    ON_DEVICE: constexpr,
    BLOCK: constexpr,
) -> None:
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
            COPY=out is not None,
            ON_DEVICE=on_device,
            BLOCK=BLOCK,
            num_warps=4,
        )


class MomentumSpec(NamedTuple):
    """A request: device type, dtype of gradients or updates, dtype of what is changed, whether all are contiguous."""

    device: str
    dtype: torch.dtype
    state_dtype: torch.dtype
    contiguous: bool = True


MOMENTUM: BackendRegistry[MomentumSpec, Callable[..., None]] = BackendRegistry("momentum_step")
DECAYED: BackendRegistry[MomentumSpec, Callable[..., None]] = BackendRegistry("decayed_step")
REGISTRIES = (MOMENTUM, DECAYED)
EXAMPLE = MomentumSpec("cpu", torch.float32, torch.float32)


def _triton_why_not(spec: MomentumSpec) -> str | None:
    if not spec.contiguous:
        return "needs contiguous tensors"
    return triton_why_not(spec.device, spec.dtype, spec.state_dtype)


MOMENTUM.register(Backend("triton", triton_momentum, 20, _triton_why_not))
MOMENTUM.register(Backend("reference", reference_momentum, 0, serve_all))
DECAYED.register(Backend("triton", triton_decayed, 20, _triton_why_not))
DECAYED.register(Backend("reference", reference_decayed, 0, serve_all))


@remembered
def _choose(registry: BackendRegistry[MomentumSpec, Callable[..., None]], spec: MomentumSpec) -> Callable[..., None]:
    return registry.select(spec).fn


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
    _choose(MOMENTUM, MomentumSpec(out.device.type, gradient.dtype, buffer.dtype, flat))(
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
    _choose(DECAYED, spec)(param, update, lr, weight_decay, out)
