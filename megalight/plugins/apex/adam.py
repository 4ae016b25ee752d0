"""Adam by Apex's multi-tensor kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megalight.ops.adam import Spec
from megalight.plugins.apex.package import PACKAGE
from megalight.plugins.apex.package import why_not as package_why_not

APPLY = "apex.multi_tensor_apply:multi_tensor_applier"
EXTENSION = "amp_C"
CORRECT_BIAS = 1


def why_not(spec: Spec) -> str | None:
    """Why a step cannot be served."""
    if not spec.contiguous:
        return "needs contiguous tensors"
    if {spec.dtype, spec.grad_dtype, *spec.state_dtypes} != {torch.float32}:
        return "needs parameters, gradients and moments in float32"
    kernels = (f"{EXTENSION}:multi_tensor_adam", f"{EXTENSION}:multi_tensor_adam_capturable")
    return package_why_not(spec.device, "fused Adam", APPLY, *kernels)


@lru_cache
def _no_overflow(device: torch.device) -> Tensor:
    """The flag by which a step could be skipped: never set."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float | Tensor,
    decoupled: bool = True,
    grad_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """One kernel; scaling the gradient and writing ``out`` are passes of their own."""
    if not param.numel():
        return
    if grad_scale is not None:
        grad = grad * grad_scale.float()
    apply, flag = PACKAGE.load(APPLY), _no_overflow(param.device)
    rest = (int(decoupled), CORRECT_BIAS, weight_decay)
    if isinstance(lr, Tensor) or isinstance(step, Tensor):
        rate = torch.as_tensor(lr, dtype=torch.float32, device=param.device)
        count = torch.as_tensor(step, device=param.device).to(torch.int32)
        # This kernel multiplies by a last argument, and writes the product back: it gets a copy that it may write.
        own = grad.clone() if grad_scale is None else grad
        one = torch.ones(1, dtype=torch.float32, device=param.device)
        apply(
            PACKAGE.load(f"{EXTENSION}:multi_tensor_adam_capturable"),
            flag,
            [[own], [param], [exp_avg], [exp_avg_sq]],
            *(rate, beta1, beta2, eps, count, *rest, one),
        )
    else:
        apply(
            PACKAGE.load(f"{EXTENSION}:multi_tensor_adam"),
            flag,
            [[grad], [param], [exp_avg], [exp_avg_sq]],
            *(float(lr), beta1, beta2, eps, int(step), *rest),
        )
    if out is not None:
        out.copy_(param)
