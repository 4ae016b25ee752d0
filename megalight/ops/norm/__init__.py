"""RMS norm and layer norm over the last dim, alone or fused with the residual addition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.batch_invariant import MODE, refuse, rowwise
from megalight.ops.common import choose_measured, lazy, serve_all, triton_why_not, whole_why_not, wide
from megalight.registry import Backend, BackendRegistry


def reference_rms_norm(
    x: Tensor, weight: Tensor, eps: float, average: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (Zhang and Sennrich 2019)."""
    dtype = wide(x.dtype)
    y = x.to(dtype)
    mean = y.square().mean(-1, keepdim=True)
    y = y * ((mean if average is None else average(mean)) + eps).rsqrt()
    return (y * weight.to(dtype)).to(x.dtype)


def reference_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dim (Ba et al. 2016)."""
    dtype = wide(x.dtype)
    y = x.to(dtype)
    y = y - y.mean(-1, keepdim=True)
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(dtype)
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


def of_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``(x, residual, ...) -> (norm(s, ...), s)`` with ``s = x + residual``, or ``x`` without residual.

    The sum is rounded to the dtype of ``x`` before the norm, as the fused kernels do.
    """

    def add_norm(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return norm(total, *rest), total

    return add_norm


reference_add_rms_norm = of_sum(reference_rms_norm)
reference_add_layer_norm = of_sum(reference_layer_norm)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim; ``weight`` has the dtype of ``x``."""
    return F.rms_norm(x, weight.shape, weight, eps)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim; ``weight`` has the dtype of ``x``."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


torch_add_rms_norm = of_sum(torch_rms_norm)
torch_add_layer_norm = of_sum(torch_layer_norm)


class NormSpec(NamedTuple):
    """A request to a norm.

    Attributes:
        device: device type.
        dtype: dtype of the input.
        weight_dtype: dtype of the weight (and the bias).
        size: number of features of a row.
        divided: the row is a part of the features that are normalized together.
    """

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    size: int
    divided: bool = False


RMS_NORM: BackendRegistry[NormSpec, Callable[..., Tensor]] = BackendRegistry("rms_norm")
LAYER_NORM: BackendRegistry[NormSpec, Callable[..., Tensor]] = BackendRegistry("layer_norm")
ADD_RMS_NORM: BackendRegistry[NormSpec, Callable[..., tuple[Tensor, Tensor]]] = BackendRegistry("add_rms_norm")
ADD_LAYER_NORM: BackendRegistry[NormSpec, Callable[..., tuple[Tensor, Tensor]]] = BackendRegistry("add_layer_norm")
REGISTRIES: tuple[BackendRegistry[NormSpec, Any], ...] = (RMS_NORM, LAYER_NORM, ADD_RMS_NORM, ADD_LAYER_NORM)
MAX_TRITON_SIZE = 16384
EXAMPLE = NormSpec("cpu", torch.bfloat16, torch.bfloat16, 4096)


def _torch_why_not(spec: NormSpec) -> str | None:
    if spec.dtype != spec.weight_dtype:
        return f"needs a weight in the dtype of the input, {spec.dtype}"
    return whole_why_not(spec.divided)


def _triton_why_not(spec: NormSpec) -> str | None:
    if spec.size > MAX_TRITON_SIZE:
        return f"serves rows of at most {MAX_TRITON_SIZE} features, not {spec.size}"
    return whole_why_not(spec.divided) or triton_why_not(spec.device, spec.dtype, spec.weight_dtype)


_TRITON = "megalight.ops.norm.triton"
RMS_NORM.register(Backend("triton", lazy(_TRITON, "rms_norm", measures=True), 20, _triton_why_not))
RMS_NORM.register(Backend("torch", torch_rms_norm, 10, _torch_why_not))
RMS_NORM.register(Backend("reference", reference_rms_norm, 0, serve_all))
LAYER_NORM.register(Backend("triton", lazy(_TRITON, "layer_norm", measures=True), 20, _triton_why_not))
LAYER_NORM.register(Backend("torch", torch_layer_norm, 10, _torch_why_not))
LAYER_NORM.register(Backend("reference", reference_layer_norm, 0, serve_all))
ADD_RMS_NORM.register(Backend("triton", lazy(_TRITON, "add_rms_norm", measures=True), 20, _triton_why_not))
ADD_RMS_NORM.register(Backend("torch", torch_add_rms_norm, 10, _torch_why_not))
ADD_RMS_NORM.register(Backend("reference", reference_add_rms_norm, 0, serve_all))
ADD_LAYER_NORM.register(Backend("triton", lazy(_TRITON, "add_layer_norm", measures=True), 20, _triton_why_not))
ADD_LAYER_NORM.register(Backend("torch", torch_add_layer_norm, 10, _torch_why_not))
ADD_LAYER_NORM.register(Backend("reference", reference_add_layer_norm, 0, serve_all))


def check_backend(
    registry: BackendRegistry[NormSpec, Any],
    weight: Tensor,
    factor: torch.dtype,
    device: str,
    backend: str,
    divided: bool,
) -> None:
    """Raise if a backend cannot serve a norm in the dtype of its weight, before any input is there.

    Args:
        registry: the op's.
        weight: ``[size]``; also on meta.
        factor: dtype of what normed features are multiplied by.
        device: type of the device on which the norm will run.
        backend: a backend's name, or ``auto``.
        divided: see :class:`NormSpec`.

    Raises:
        BackendError: it cannot, with the reason of each backend.
    """
    choose_measured(registry, NormSpec(device, weight.dtype, factor, weight.shape[0], divided), backend)


def _spec(x: Tensor, weight: Tensor) -> NormSpec:
    return NormSpec(x.device.type, x.dtype, weight.dtype, weight.shape[0])


def _invariant(
    registry: BackendRegistry[NormSpec, Callable[..., Any]],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    backend: str,
    *rest: Any,
) -> Any:
    """Norm in batch-invariant mode. The kernels have a fixed tile for each size."""
    fn = choose_measured(registry, _spec(x, weight), "triton" if x.is_cuda else backend)
    if registry in (RMS_NORM, LAYER_NORM):
        return rowwise(lambda row: fn(row, weight, *rest), x)
    if residual is None:
        return rowwise(lambda row: fn(row, None, weight, *rest), x)
    return rowwise(lambda row, more: fn(row, more, weight, *rest), x, residual)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    backend: str = "auto",
    *,
    average: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim of ``x [..., h]``. Half types are computed in float32.

    A :func:`~megalight.ops.common.measuring` backend also finds the largest magnitudes of the result and of the
    gradient of ``x``, for later casts to 8 bits.

    ``average`` is for an ``x`` that is a part of what is normalized together: it turns mean squares ``[..., 1]`` of the
    part into those of all features. The reference serves it; fused kernels have no place for it.

    Raises:
        BackendError: the named backend cannot serve, for example because of ``average``.
    """
    if MODE.on:
        if average is not None:
            refuse("norms whose rows are divided over devices")
        out: Tensor = _invariant(RMS_NORM, x, None, weight, backend, eps)
    elif average is None:
        out = choose_measured(RMS_NORM, _spec(x, weight), backend)(x, weight, eps)
    else:
        out = choose_measured(RMS_NORM, _spec(x, weight)._replace(divided=True), backend)(
            x, weight, eps, average=average
        )
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, backend: str = "auto") -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dim of ``x [..., h]``; see :func:`rms_norm`."""
    if MODE.on:
        out: Tensor = _invariant(LAYER_NORM, x, None, weight, backend, bias, eps)
    else:
        out = choose_measured(LAYER_NORM, _spec(x, weight), backend)(x, weight, bias, eps)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(s), s)`` with ``s = x + residual`` in the dtype of both: the step between two sublayers.

    Without ``residual``, ``s`` is ``x``. If you use this ``s``, the norm's backward adds its gradient in one kernel. A
    measuring backend finds the magnitudes of the norm, not of the sum.

    Raises:
        ValueError: ``x`` and ``residual`` differ in shape or dtype.
    """
    if residual is not None and (x.shape != residual.shape or x.dtype != residual.dtype):
        raise _unlike(x, residual)
    out: tuple[Tensor, Tensor]
    if MODE.on:
        out = _invariant(ADD_RMS_NORM, x, residual, weight, backend, eps)
        return out
    # the request is written out: every layer comes here twice
    spec = NormSpec(x.device.type, x.dtype, weight.dtype, weight.shape[0])
    out = choose_measured(ADD_RMS_NORM, spec, backend)(x, residual, weight, eps)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """``(layer_norm(s), s)``, as in :func:`add_rms_norm`.

    Raises:
        ValueError: ``x`` and ``residual`` differ in shape or dtype.
    """
    if residual is not None and (x.shape != residual.shape or x.dtype != residual.dtype):
        raise _unlike(x, residual)
    if MODE.on:
        out: tuple[Tensor, Tensor] = _invariant(ADD_LAYER_NORM, x, residual, weight, backend, bias, eps)
    else:
        out = choose_measured(ADD_LAYER_NORM, _spec(x, weight), backend)(x, residual, weight, bias, eps)
    return out


def _unlike(x: Tensor, residual: Tensor) -> ValueError:
    return ValueError(
        f"x is {list(x.shape)} {x.dtype} and residual {list(residual.shape)} {residual.dtype}; "
        "shape and dtype must be equal. Cast one of them first."
    )
