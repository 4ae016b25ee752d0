"""Weight gradients added to the main gradient inside TransformerEngine's product."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.common import HALF
from megalight.ops.linear.wgrad import Spec
from megalight.plugins.transformer_engine.package import PACKAGE
from megalight.plugins.transformer_engine.package import why_not as package_why_not

MINIMUM = "2.1"
GEMM = "transformer_engine.pytorch.cpp_extensions:general_gemm"
WORKSPACE = "transformer_engine.pytorch.module.base:get_workspace"


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve an accumulation, or None."""
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    if spec.main_dtype not in (torch.float32, spec.dtype):
        return f"needs a main gradient in float32 or the operands' type, not {spec.main_dtype}"
    return package_why_not(spec.device, "the fused weight gradient", MINIMUM, GEMM)


# By signature, as versions do not tell which form a build has.
@lru_cache
def _takes_workspace(gemm: Any) -> bool:
    """Return whether the caller must pass a workspace, as in releases before about 2.10."""
    return "workspace" in inspect.signature(gemm).parameters


def workspace(gemm: Any) -> dict[str, Any]:
    """Return the extra arguments that the product needs in the installed release."""
    return {"workspace": PACKAGE.load(WORKSPACE)()} if _takes_workspace(gemm) else {}


def accumulate(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    """``main_grad [out, in] += grad_y [T, out]^T x [T, in]``, with sums in float32. With ``write``: ``=``."""
    gemm = PACKAGE.load(GEMM)
    gemm(
        x.contiguous(),
        grad_y.contiguous(),
        out_dtype=main_grad.dtype,
        # cuBLAS is column-major: `grad_y^T x` is its `x^T grad_y`, and the input comes first.
        layout="NT",
        # With beta = 0, a `write` never reads what was there.
        accumulate=not write,
        out=main_grad,
        grad=True,
        **workspace(gemm),
    )
