"""One Adam step in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.adam import narrow
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
    first = beta1 * narrow.read(exp_avg, exponents[0], False).to(param.dtype) + (1 - beta1) * grad
    second = beta2 * narrow.read(exp_avg_sq, exponents[1], True).to(param.dtype) + (1 - beta2) * grad * grad
    narrow.write(exp_avg, exponents[0], first, False, step)
    narrow.write(exp_avg_sq, exponents[1], second, True, step)
    step = torch.as_tensor(step, dtype=torch.float64)  # 1 - beta**step loses digits in float32
    param = param - lr * (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + eps)
    stored.copy_(param)
    if out is not None:
        out.copy_(param)
