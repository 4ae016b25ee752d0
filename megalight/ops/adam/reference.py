"""Adam in plain torch: the exact reference, torch's fused kernel, and the fused kernel chunk by chunk for hosts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.adam import low_precision_moments
from megalight.ops.common import wide


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
    exponents: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Adam (Kingma and Ba 2015) or, with ``decoupled``, AdamW (Loshchilov and Hutter 2019)."""
    # Parameters in half precision are rounded once, after the whole update.
    stored, param = param, param.to(wide(param.dtype))
    grad = grad.to(param.dtype)
    if grad_scale is not None:
        grad = grad * grad_scale.to(param.dtype)
    # The decay comes before the update and uses the old parameter, as in `torch.optim.AdamW`.
    if weight_decay and decoupled:
        param = param * (1 - lr * weight_decay)
    elif weight_decay:
        grad = grad + weight_decay * param
    # Moments may be stored in fewer bits. The update uses them before they are rounded.
    first = beta1 * low_precision_moments.read(exp_avg, exponents[0], False).to(param.dtype) + (1 - beta1) * grad
    second = (
        beta2 * low_precision_moments.read(exp_avg_sq, exponents[1], True).to(param.dtype) + (1 - beta2) * grad * grad
    )
    low_precision_moments.write(exp_avg, exponents[0], first, False, step)
    low_precision_moments.write(exp_avg_sq, exponents[1], second, True, step)
    step = torch.as_tensor(step, dtype=torch.float64)  # 1 - beta**step loses digits in float32
    param = param - lr * (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + eps)
    stored.copy_(param)
    if out is not None:
        out.copy_(param)


# One Adam step with torch's fused kernels.


def torch_adam_step(
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


# One Adam step with torch's fused kernels, piece by piece: for hosts, and for moments or gradients in fewer bits.
#
# A piece is scaled or widened, updated, and rounded while it is in the caches of the cores. Whole tensors would take
# the memory of a scaled gradient, which the host sets to zero in each step, and one more pass for every such change.


SHARE = 1 << 17
"""Elements of a piece for each thread: 512 KiB per tensor, so that those of a step about fit into a core's cache."""


def piece() -> int:
    """Return the number of elements of a piece, a multiple of :data:`.narrow.BLOCK`."""
    return SHARE * torch.get_num_threads()


def chunked_adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: float | Tensor,
    out: Tensor | None = None,
    exponents: tuple[Tensor | None, Tensor | None] = (None, None),
    **options: Any,
) -> None:
    """Update pieces in turn; see :func:`megalight.ops.adam.adam_step`."""
    size = piece()
    flat = [tensor.view(-1) for tensor in (param, grad, exp_avg, exp_avg_sq)]
    for start in range(0, param.numel(), size):
        own, gradient, *moments = (tensor[start : start + size] for tensor in flat)
        blocks = slice(start // low_precision_moments.BLOCK, (start + size) // low_precision_moments.BLOCK)
        shared = [None if each is None else each[blocks] for each in exponents]
        wide = [
            low_precision_moments.read(moment, each, bool(second)).to(param.dtype)
            for second, (moment, each) in enumerate(zip(moments, shared, strict=True))
        ]
        torch_adam_step(
            own,
            gradient.to(param.dtype),
            *wide,
            step=step,
            out=None if out is None else out.view(-1)[start : start + size],
            **options,
        )
        for second, (moment, each, values) in enumerate(zip(moments, shared, wide, strict=True)):
            if values is not moment:
                low_precision_moments.write(moment, each, values, bool(second), step)
