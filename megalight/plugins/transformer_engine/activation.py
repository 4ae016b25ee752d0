"""Activations by TransformerEngine's kernels: what Megatron calls ``use_te_activation_func``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.activation import Spec
from megalight.ops.common import HALF, once_differentiable
from megalight.plugins.transformer_engine.package import KERNELS, kernel
from megalight.plugins.transformer_engine.package import why_not as package_why_not

MINIMUM = "2.8"
KINDS = {
    "silu": ("silu", "swiglu"),
    "gelu_tanh": ("gelu", "geglu"),
    "quick_gelu": ("qgelu", "qgeglu"),
    "relu": ("relu", "reglu"),
    "squared_relu": ("srelu", "sreglu"),
}
"""Our name -> names of the plain and the gated kernel. The backward kernel has a ``d`` in front. GELU is with tanh."""


# The backward kernel is asked for, too: it is found missing now, and not in the first backward.
def _why_not(spec: Spec, gates: bool) -> str | None:
    if spec.kind not in KINDS:
        return f"has no {spec.kind}; it has {', '.join(KINDS)}"
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    name = KINDS[spec.kind][gates]
    kernels = (f"{KERNELS}:{name}", f"{KERNELS}:d{name}")
    return package_why_not(spec.device, f"the activation {name}", MINIMUM, *kernels)


def gated_why_not(spec: Spec) -> str | None:
    """Return why it cannot serve the gated form, or None."""
    return _why_not(spec, True)


def activation_why_not(spec: Spec) -> str | None:
    """Return why it cannot serve the plain form, or None."""
    return _why_not(spec, False)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        # Kept as the kernel reads it, so that the backward makes no second copy.
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.name = name
        out: Tensor = kernel(name)(x, None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        # The kernel returns rows of two dims.
        return kernel(f"d{ctx.name}")(grad_y.contiguous(), x, None).view(x.shape), None


def activation(x: Tensor, kind: str) -> Tensor:
    """``act(x)``."""
    out: Tensor = _Activation.apply(x, KINDS[kind][0])  # type: ignore[no-untyped-call]
    return out


def gated(x: Tensor, kind: str) -> Tensor:
    """``act(gate) * up`` with ``x = gate | up`` along the last dim, as the kernels define it."""
    out: Tensor = _Activation.apply(x, KINDS[kind][1])  # type: ignore[no-untyped-call]
    return out
