"""One Adam step in a single pass over memory: moments, parameters and the low-precision copy."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, tl

# Eight elements per thread with four warps. The step is bound by memory, so wide loads matter.
BLOCK = 1024


@jit
def _step(
    param: Value,
    grad: Value,
    exp_avg: Value,
    exp_avg_sq: Value,
    out: Value,
    grad_scale: Value,
    scalars: Value,
    n: Value,
    lr: Value,
    step_size: Value,
    root_correction: Value,
    beta1: Value,
    beta2: Value,
    rest1: Value,
    rest2: Value,
    eps: Value,
    weight_decay: Value,
    DECOUPLED: constexpr,
    SCALED: constexpr,
    COPY: constexpr,
    ON_DEVICE: constexpr,
    BLOCK: constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    if ON_DEVICE:  # learning rate or step number is a tensor, so a captured step follows later changes
        lr = tl.load(scalars)
        step_size = tl.load(scalars + 1)
        root_correction = tl.load(scalars + 2)
    # All arithmetic is in float32, whatever dtypes gradients and moments are stored in.
    p = tl.load(param + index, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + index, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + index, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        g *= tl.load(grad_scale)
    # AdamW decays before the update, with the old parameter, as torch does.
    if DECOUPLED:
        p -= lr * weight_decay * p
    else:
        g += weight_decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    # The bias corrections are folded into two host scalars: lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t).
    p -= step_size * m / (tl.sqrt(v) * root_correction + eps)
    tl.store(param + index, p.to(param.dtype.element_ty), mask=inside)
    tl.store(exp_avg + index, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + index, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if COPY:
        # From the float32 `p`, not from what was stored: a low-precision copy is rounded once.
        tl.store(out + index, p.to(out.dtype.element_ty), mask=inside)


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
    """Run the whole step in one kernel, without making the host wait for the device."""
    on_device = isinstance(lr, Tensor) or isinstance(step, Tensor)
    scalars = None
    rate, step_size, root_correction = 0.0, 0.0, 0.0
    if on_device:  # bias corrections in float64, as on the host: 1 - beta**step loses digits in float32
        rates = torch.as_tensor(lr, dtype=torch.float64, device=param.device)
        count = torch.as_tensor(step, dtype=torch.float64, device=param.device)
        scalars = torch.stack((rates, rates / (1 - beta1**count), (1 - beta2**count).rsqrt())).float()
    else:
        rate = float(lr)
        step_size, root_correction = rate / (1 - beta1 ** float(step)), (1 - beta2 ** float(step)) ** -0.5
    if not param.numel():
        return
    _step[(cdiv(param.numel(), BLOCK),)](
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        out,
        None if grad_scale is None else grad_scale.float(),
        scalars,
        param.numel(),
        rate,
        step_size,
        root_correction,
        beta1,
        beta2,
        # Computed in float64 on the host. In the kernel, 1 - 0.999 in float32 would be wrong in the fifth digit.
        1 - beta1,
        1 - beta2,
        eps,
        float(weight_decay),
        DECOUPLED=decoupled,
        SCALED=grad_scale is not None,
        COPY=out is not None,
        ON_DEVICE=on_device,
        BLOCK=BLOCK,
        num_warps=4,
    )
