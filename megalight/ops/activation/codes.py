"""Activations between two products in 8 bits: their outputs, and the gradients of their inputs, are codes alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.activation import activation, gated, native
from megalight.ops.common import apply, lazy, once_differentiable, serve_all, triton_why_not
from megalight.ops.quantize import Scheme, amax_of, cast, whole_cast_why_not
from megalight.ops.unwritten import Told, unwritten
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """A request: device type, dtype, name of the activation, schemes of the matrix and of its transpose."""

    device: str
    dtype: torch.dtype
    kind: str
    rows: Scheme | None
    columns: Scheme | None


Forward: TypeAlias = Callable[[Tensor, str, bool, Scheme | None, Scheme | None, Tensor], Told]
Backward: TypeAlias = Callable[[Tensor, Tensor, str, bool, Scheme | None, Scheme | None, Tensor], Told]
CAST_ACTIVATION: BackendRegistry[Spec, Forward] = BackendRegistry("cast_activation")
CAST_ACTIVATION_GRADIENT: BackendRegistry[Spec, Backward] = BackendRegistry("cast_activation_gradient")


def cast_activation(
    x: Tensor,
    kind: str,
    gates: bool,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor,
    backend: str = "auto",
) -> Told:
    """Cast ``act(x)`` or, if gated, ``act(gate) * up``, rounded to the dtype of ``x [T, f]`` or ``[T, 2 f]``.

    Args:
        x: the input of the activation.
        kind: name of the activation.
        gates: whether ``x`` is gate and up.
        rows, columns: as for :func:`~megalight.ops.quantize.cast`.
        amax: what the scales cover, 0-dim float32.
        backend: name of a backend.

    Returns:
        the casts, and magnitudes of which the largest is that of what was cast.
    """
    spec = Spec(x.device.type, x.dtype, kind, rows, columns)
    return _choose(CAST_ACTIVATION, spec, backend)(x, kind, gates, rows, columns, amax)


def cast_activation_gradient(
    grad_y: Tensor,
    x: Tensor,
    kind: str,
    gates: bool,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor,
    backend: str = "auto",
) -> Told:
    """Cast the gradient of ``x``, rounded to its dtype, from that of the output; see :func:`cast_activation`."""
    spec = Spec(x.device.type, x.dtype, kind, rows, columns)
    return _choose(CAST_ACTIVATION_GRADIENT, spec, backend)(grad_y, x, kind, gates, rows, columns, amax)


@remembered
def _choose(registry: BackendRegistry[Spec, Any], spec: Spec, backend: str) -> Callable[..., Told]:
    found: Callable[..., Told] = registry.select(spec, backend).fn
    return found


def _plain(x: Tensor, kind: str, gates: bool) -> Tensor:
    return native.gated(x, kind) if gates else native.activation(x, kind)


def _cast_reference(
    x: Tensor, kind: str, gates: bool, rows: Scheme | None, columns: Scheme | None, amax: Tensor
) -> Told:
    y = _plain(x, kind, gates)
    return cast(y, rows, columns, amax=amax, amax_t=amax), amax_of(y)


def _cast_gradient_reference(
    grad_y: Tensor, x: Tensor, kind: str, gates: bool, rows: Scheme | None, columns: Scheme | None, amax: Tensor
) -> Told:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(_plain(leaf, kind, gates), leaf, grad_y)
    return cast(grad, rows, columns, amax=amax, amax_t=amax), amax_of(grad)


def _triton_why_not(spec: Spec) -> str | None:
    return whole_cast_why_not(spec.dtype, spec.rows, spec.columns) or triton_why_not(spec.device, spec.dtype)


_TRITON = "megalight.ops.activation.codes_triton"
CAST_ACTIVATION.register(Backend("triton", lazy(_TRITON, "cast_activation"), 10, _triton_why_not))
CAST_ACTIVATION.register(Backend("reference", _cast_reference, 0, serve_all))
CAST_ACTIVATION_GRADIENT.register(Backend("triton", lazy(_TRITON, "cast_activation_gradient"), 10, _triton_why_not))
CAST_ACTIVATION_GRADIENT.register(Backend("reference", _cast_gradient_reference, 0, serve_all))


class _OfCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, gates: bool, backend: str, written: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.gates = kind, gates
        if written:
            return (gated if gates else activation)(x, kind, backend)
        shape = (len(x), x.shape[1] // 2 if gates else x.shape[1])
        return unwritten(shape, x, partial(cast_activation, x.detach(), kind, gates))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        make = partial(cast_activation_gradient, grad_y, x.detach(), ctx.kind, ctx.gates)
        return unwritten(tuple(x.shape), x, make), None, None, None, None


def activation_of_codes(x: Tensor, kind: str, gates: bool, backend: str = "auto", *, written: bool) -> Tensor:
    """Return ``act(x)``, or ``act(gate) * up``, of ``x [T, f]`` or ``[T, 2 f]``; the gradient of ``x`` is not written.

    It is :mod:`~megalight.ops.unwritten`: ``x`` must come from a product in 8 bits, and nothing else may read its
    gradient. With ``written=False`` the output is unwritten, too: the next product must know its scales beforehand.
    ``backend`` is that of the activation that is written.
    """
    out: Tensor = apply(_OfCodes, x.contiguous(), kind, gates, backend, written)
    return out
