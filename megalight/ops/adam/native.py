"""One Adam step with torch's fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Call the fused update. To scale the gradient and to write ``out`` take separate passes over memory."""
    # torch's own `grad_scale` argument divides, and needs a `found_inf`; so multiply first.
    if grad_scale is not None:
        grad = grad * grad_scale.to(grad.dtype)
    if isinstance(step, Tensor):
        # torch's kernel wants the step on the device, and does not advance it here.
        count = step.to(param.device, torch.float32)
    else:
        count = torch.full((), float(step), dtype=torch.float32, device=param.device)
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [count],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    if out is not None:
        out.copy_(param)
