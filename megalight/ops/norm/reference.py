"""Norms in plain torch. Half types are computed in float32 and rounded once, at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float, average: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (Zhang and Sennrich 2019)."""
    dtype = wide(x.dtype)
    y = x.to(dtype)
    mean = y.square().mean(-1, keepdim=True)
    y = y * ((mean if average is None else average(mean)) + eps).rsqrt()
    return (y * weight.to(dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
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


add_rms_norm = of_sum(rms_norm)
add_layer_norm = of_sum(layer_norm)


# Norms with torch's own fused functions.


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim; ``weight`` has the dtype of ``x``."""
    return F.rms_norm(x, weight.shape, weight, eps)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim; ``weight`` has the dtype of ``x``."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


torch_add_rms_norm = of_sum(torch_rms_norm)
torch_add_layer_norm = of_sum(torch_layer_norm)
