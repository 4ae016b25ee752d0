"""Norms over the last dim."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.nn.init import ConstantInit, Initializer
from megalight.ops.batch_invariant import MODE
from megalight.ops.common import wide
from megalight.ops.norm import (
    LAYER_NORM,
    RMS_NORM,
    add_layer_norm,
    add_rms_norm,
    check_backend,
    layer_norm,
    rms_norm,
)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` (https://arxiv.org/abs/1910.07467).

    Args:
        size: number of features.
        eps: added to the mean square.
        backend: backend of the op.
        around_zero: the factor is ``1 + weight`` (Gemma).

    Attributes:
        weight: ``[size]``, initially a factor of 1.
        average: if the features here are a part of those that are normalized together: mean squares here -> of all.
            None: they are all of them. It is not for a norm that also adds a residual.
    """

    average: Callable[[Tensor], Tensor] | None = None

    def __init__(self, size: int, eps: float = 1e-5, backend: str = "auto", *, around_zero: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.backend = backend
        self.around_zero = around_zero
        # Without values: `initializers` describe them, and a model is often built without memory.
        self.weight = nn.Parameter(torch.empty(size))
        self.initializers: dict[str, Initializer] = {"weight": ConstantInit(0.0 if around_zero else 1.0)}

    @property
    def factor(self) -> Tensor:
        """``[size]``: what normed features are multiplied by."""
        if not self.around_zero:
            return self.weight
        # In a wide dtype: half types have fewer digits near 1 than near 0, so the sum would round small weights away.
        return self.weight.to(wide(self.weight.dtype)) + 1

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, pair: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``[..., size] -> [..., size]``. With ``residual`` of the same dtype: ``(norm(x + residual), x + residual)``.

        With ``pair`` and without ``residual``: ``(norm(x), x)``.
        """
        if residual is None and not pair:
            # One op for the norm alone. Its backward has no second gradient to add.
            return rms_norm(x, self.factor, self.eps, backend=self.backend, average=self.average)
        assert self.average is None
        factor = self.factor if self.around_zero else self.weight
        return add_rms_norm(x, residual, factor, self.eps, self.backend)

    def check_backend(self, device: torch.device) -> None:
        """Raise if the named backend cannot serve on ``device``; see :func:`~megalight.ops.norm.check_backend`."""
        divided = self.average is not None
        check_backend(RMS_NORM, self.weight, self.factor.dtype, device.type, self.backend, divided)

    def extra_repr(self) -> str:
        """Return size and eps, for printing."""
        return f"{self.weight.numel()}, eps={self.eps}"


class L2Norm(nn.Module):
    """``x / sqrt(mean(x^2) + eps)``: a norm without weights (Llama 4, of queries and keys)."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size] -> [..., size]``."""
        if MODE.on:
            return rms_norm(x, x.new_ones(x.shape[-1]), self.eps)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)

    def extra_repr(self) -> str:
        """Return eps, for printing."""
        return f"eps={self.eps}"


class LayerNorm(nn.Module):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` (https://arxiv.org/abs/1607.06450).

    Attributes:
        weight: ``[size]``, initially 1.
        bias: ``[size]``, initially 0, or None.
    """

    def __init__(self, size: int, eps: float = 1e-5, bias: bool = True, backend: str = "auto") -> None:
        super().__init__()
        self.eps = eps
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(size))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(size)) if bias else None)
        self.initializers: dict[str, Initializer] = {"weight": ConstantInit(1.0), "bias": ConstantInit(0.0)}

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, pair: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``[..., size] -> [..., size]``. With ``residual`` of the same dtype: ``(norm(x + residual), x + residual)``.

        With ``pair`` and without ``residual``: ``(norm(x), x)``.
        """
        if residual is None and not pair:
            return layer_norm(x, self.weight, self.bias, self.eps, backend=self.backend)
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, backend=self.backend)

    def check_backend(self, device: torch.device) -> None:
        """Raise if the named backend cannot serve on ``device``; see :func:`~megalight.ops.norm.check_backend`."""
        check_backend(LAYER_NORM, self.weight, self.weight.dtype, device.type, self.backend, divided=False)

    def extra_repr(self) -> str:
        """Return size, eps and bias, for printing."""
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"


FUSED = (RMSNorm, LayerNorm)
"""Norms that add the residual themselves."""


def norm_and_sum(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``(norm(s), s)`` with ``s = x + residual``, or ``s = x`` without a residual.

    For norms of this file, one op computes both: the sum and the norm in forward, and the sum of both gradients in
    backward. It needs equal dtypes of ``x`` and ``residual``.
    """
    if isinstance(norm, FUSED) and (residual is None or x.dtype == residual.dtype):
        both: tuple[Tensor, Tensor] = norm(x, residual, pair=True)
        return both
    # Different dtypes (a foreign module, autocast) are promoted here, as in an ordinary addition.
    total = x if residual is None else x + residual
    return norm(total), total
