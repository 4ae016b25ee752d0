"""Weight gradients added to the main gradient inside Apex's product."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops.common import HALF
from megalight.ops.linear.wgrad import Spec
from megalight.plugins.apex.package import PACKAGE
from megalight.plugins.apex.package import why_not as package_why_not

EXTENSION = "fused_weight_gradient_mlp_cuda"


def _kernel(dtype: torch.dtype) -> str:
    return f"{EXTENSION}:wgrad_gemm_accum_{'fp32' if dtype == torch.float32 else 'fp16'}"


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve an accumulation, or None."""
    if spec.dtype not in HALF or spec.main_dtype not in (torch.float32, spec.dtype):
        return "needs half operands, and a main gradient in float32 or their type"
    return package_why_not(spec.device, "the fused weight gradient", "apex", _kernel(spec.main_dtype))


def accumulate(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    """``main_grad [out, in] += grad_y [T, out]^T x [T, in]``; ``write``: to zeros, as the kernel only adds.

    Raises:
        BackendError: ``main_grad`` is not contiguous; the kernel would not notice.
    """
    if not main_grad.is_contiguous():
        raise BackendError(
            f"apex adds to contiguous main gradients, and this one, {list(main_grad.shape)}, is not. "
            "Next: weight_gradient='auto'."
        )
    if write:
        # The old content may be NaN: a product with beta = 1 would keep it.
        main_grad.zero_()
    # The kernel reads rows as they lie in memory.
    PACKAGE.load(_kernel(main_grad.dtype))(x.contiguous(), grad_y.contiguous(), main_grad)
