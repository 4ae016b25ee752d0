"""Adam by TransformerEngine's multi-tensor kernels, which also write the low-precision copy."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megalight.ops.adam import Spec
from megalight.ops.common import HALF
from megalight.plugins.transformer_engine.package import KERNELS, PACKAGE, kernel
from megalight.plugins.transformer_engine.package import why_not as package_why_not

MINIMUM = "2.1"
APPLY = "transformer_engine.pytorch.optimizers:multi_tensor_applier"
CORRECT_BIAS = 1


def why_not(spec: Spec) -> str | None:
    """Why a step cannot be served."""
    if not spec.contiguous:
        return "needs contiguous tensors"
    if spec.dtype != torch.float32 or set(spec.state_dtypes) != {torch.float32}:
        return "needs parameters and moments in float32"
    if spec.grad_dtype not in (*HALF, torch.float32):
        return f"serves gradients in bfloat16, float16 and float32, not {spec.grad_dtype}"
    if spec.out_dtype not in (None, *HALF, torch.float32):
        return f"writes copies in bfloat16, float16 and float32, not {spec.out_dtype}"
    kernels = (APPLY, f"{KERNELS}:multi_tensor_adam", f"{KERNELS}:multi_tensor_adam_capturable")
    return package_why_not(spec.device, "fused Adam", MINIMUM, *kernels)


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
    """One kernel; scaling the gradient is a pass of its own, and so is ``out`` where ``lr`` or ``step`` is a tensor."""
    if not param.numel():
        return
    if grad_scale is not None:
        grad = grad.float() * grad_scale.float()
    apply, flag = PACKAGE.load(APPLY), _no_overflow(param.device)
    if isinstance(lr, Tensor) or isinstance(step, Tensor):
        rate = torch.as_tensor(lr, dtype=torch.float32, device=param.device)
        count = torch.as_tensor(step, device=param.device).to(torch.int32)
        # This kernel multiplies by a last argument, and writes the product back: it gets a copy that it may write.
        grad = grad.float() if grad_scale is not None or grad.dtype != torch.float32 else grad.clone()
        lists = [[grad], [param], [exp_avg], [exp_avg_sq]]
        one = torch.ones(1, dtype=torch.float32, device=param.device)
        apply(
            kernel("multi_tensor_adam_capturable"),
            flag,
            lists,
            *(rate, beta1, beta2, eps, count, int(decoupled), CORRECT_BIAS, weight_decay, one),
        )
        if out is not None:
            out.copy_(param)
        return
    lists = [[grad], [param], [exp_avg], [exp_avg_sq]]
    if out is not None:
        lists = [[grad], [out], [exp_avg], [exp_avg_sq], [param]]
    apply(
        kernel("multi_tensor_adam"),
        flag,
        lists,
        *(float(lr), beta1, beta2, eps, int(step), int(decoupled), CORRECT_BIAS, weight_decay),
    )
