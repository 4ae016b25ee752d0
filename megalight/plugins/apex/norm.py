"""Apex's fused norms."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.common import HALF, whole_why_not
from megalight.ops.norm import Spec
from megalight.ops.norm.reference import of_sum
from megalight.plugins.apex.package import PACKAGE
from megalight.plugins.apex.package import why_not as package_why_not

MODULE = "apex.normalization.fused_layer_norm"
EXTENSION = "fused_layer_norm_cuda"


def _why_not(spec: Spec, function: str) -> str | None:
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    if spec.dtype != spec.weight_dtype:
        return f"needs a weight in the dtype of the input, {spec.dtype}"
    reason = whole_why_not(spec.divided)
    return reason or package_why_not(spec.device, "the fused norm", f"{MODULE}:{function}", EXTENSION)


def rms_why_not(spec: Spec) -> str | None:
    """Return why it cannot serve RMS norm, or None."""
    return _why_not(spec, "fused_rms_norm_affine")


def layer_why_not(spec: Spec) -> str | None:
    """Return why it cannot serve layer norm, or None."""
    return _why_not(spec, "fused_layer_norm_affine")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim."""
    out: Tensor = PACKAGE.load(f"{MODULE}:fused_rms_norm_affine")(x, weight, tuple(weight.shape), eps)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim. The kernel always adds a bias; without one it gets zeros."""
    shift = torch.zeros_like(weight) if bias is None else bias
    out: Tensor = PACKAGE.load(f"{MODULE}:fused_layer_norm_affine")(x, weight, shift, tuple(weight.shape), eps)
    return out


# The package has no kernel for both, so the sum is a pass of its own.
add_rms_norm = of_sum(rms_norm)
add_layer_norm = of_sum(layer_norm)
