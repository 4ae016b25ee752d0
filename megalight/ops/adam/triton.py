"""One Adam step in a single pass over memory: moments, parameters, and the low-precision copy or the quantized one."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops import adam
from megalight.ops.adam import STEPS, QuantizedOutput, wrapped
from megalight.ops.cast_flat import TYPES, scaled
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize import TINY
from megalight.ops.quantize.formats import LARGEST

# Eight elements per thread with four warps. The step is bound by memory, so wide loads matter.
BLOCK = 1024


FLOATS, ROUNDED, QUANTIZED = constexpr(0), constexpr(1), constexpr(2)
"""How moments are stored: floats, bfloat16 rounded at random, or 8 bits (:mod:`megalight.ops.adam`)."""
SHARING = constexpr(adam.MOMENT_BLOCK)
HALF_BITS, QUANTIZED_BITS = constexpr(adam.HALF_BITS), constexpr(adam.QUANTIZED_BITS)
HALF_MASK, QUANTIZED_MASK = (
    constexpr((1 << adam.HALF_BITS) - 1),
    constexpr((1 << adam.QUANTIZED_BITS) - 1),
)
MULTIPLIER, LOWEST = constexpr(adam.MULTIPLIER), constexpr(adam.LOWEST)


@jit
def _noise(bits: Value, shift: Value, WIDTH: constexpr, MASK: constexpr) -> Value:
    return (((bits + shift) * MULTIPLIER) >> (32 - WIDTH)) & MASK


@jit
def _read(
    moment: Value, exponents: Value, index: Value, inside: Value, SECOND: constexpr, LIMIT: constexpr, FORM: constexpr
) -> Value:
    if FORM == QUANTIZED:
        found = tl.load(moment + index, mask=inside, other=0).to(tl.int32)
        size = found & LIMIT
        highest = tl.load(exponents + index // SHARING, mask=inside, other=0).to(tl.int32)
        bits = tl.where(size > 0, (size + (highest * 8 + 7 - LIMIT)) << QUANTIZED_BITS, 0)
        value = bits.to(tl.float32, bitcast=True)
        value = value * value if SECOND else tl.where(found > 127, -value, value)
    else:
        value = tl.load(moment + index, mask=inside, other=0.0).to(tl.float32)
    return value


@jit
def _write(
    moment: Value, exponents: Value, start: Value, n: Value, value: Value, shift: Value,
    SECOND: constexpr, LIMIT: constexpr, FORM: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    index = start + tl.arange(0, BLOCK)
    inside = index < n
    if FORM == QUANTIZED:
        value = tl.where(inside, value, 0.0)
        bits = value.to(tl.int32, bitcast=True)
        size = (tl.sqrt(value) if SECOND else tl.abs(value)).to(tl.int32, bitcast=True)
        steps = (size + _noise(bits, shift, QUANTIZED_BITS, QUANTIZED_MASK)) >> QUANTIZED_BITS
        blocks = tl.reshape(steps, [BLOCK // SHARING, SHARING])
        highest = tl.minimum(tl.maximum(tl.max(blocks, axis=1) >> 3, LOWEST), 255)
        place = start // SHARING + tl.arange(0, BLOCK // SHARING)
        tl.store(exponents + place, highest.to(tl.uint8), mask=place * SHARING < n)
        found = tl.reshape(blocks - (highest * 8 + 7 - LIMIT)[:, None], [BLOCK])
        found = tl.minimum(tl.maximum(found, 0), LIMIT)
        found = tl.where(size > 0, tl.maximum(found, 1), 0) if SECOND else found | tl.where(bits < 0, 128, 0)
        tl.store(moment + index, found.to(tl.uint8), mask=inside)
    elif FORM == ROUNDED:
        bits = value.to(tl.int32, bitcast=True)
        bits = ((bits + _noise(bits, shift, HALF_BITS, HALF_MASK)) >> HALF_BITS) << HALF_BITS
        tl.store(moment + index, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=inside)
    else:
        tl.store(moment + index, value.to(moment.dtype.element_ty), mask=inside)


@jit
def _step(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, exponents: Value, exponents_sq: Value, out: Value,
    amax: Value, largest: Value, grad_scale: Value, scalars: Value,
    n: Value, lr: Value, step_size: Value, root_correction: Value, beta1: Value, beta2: Value, rest1: Value,
    rest2: Value, eps: Value, weight_decay: Value, shift: Value,
    FIRST: constexpr, SECOND: constexpr, DECOUPLED: constexpr, SCALED: constexpr, COPY: constexpr,
    QUANTIZE_OUT: constexpr, TELL: constexpr, BEFORE: constexpr, TOP: constexpr, SMALLEST: constexpr, POWER: constexpr,
    ON_DEVICE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    inside = index < n
    if ON_DEVICE:  # learning rate or step number is a tensor, so a captured step follows later changes
        lr = tl.load(scalars)
        step_size = tl.load(scalars + 1)
        root_correction = tl.load(scalars + 2)
        shift = tl.load(scalars + 3).to(tl.int32) * shift  # `shift` is the factor of the step's number
    # All arithmetic is in float32, whatever dtypes gradients and moments are stored in.
    p = tl.load(param + index, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
    m = _read(exp_avg, exponents, index, inside, False, 127, FIRST)
    v = _read(exp_avg_sq, exponents_sq, index, inside, True, 255, SECOND)
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
    _write(exp_avg, exponents, start, n, m, shift, False, 127, FIRST, BLOCK)
    _write(exp_avg_sq, exponents_sq, start, n, v, shift, True, 255, SECOND, BLOCK)
    if COPY:
        # From the float32 `p`, not from what was stored: a low-precision copy is rounded once.
        tl.store(out + index, p.to(out.dtype.element_ty), mask=inside)
    if QUANTIZE_OUT:
        # As :mod:`megalight.ops.cast_flat` casts what was stored, bit by bit.
        value = tl.where(inside, p, 0.0).to(BEFORE).to(tl.float32)
        if TELL:
            # As integers, floats that are not negative have the same order. Most programs find nothing larger, so few
            # of them meet at this one number.
            most = tl.max(tl.abs(value), 0).to(tl.int32, bitcast=True)
            if most > tl.load(largest):
                tl.atomic_max(largest, most, sem="relaxed")
        value = scaled(value, amax, TOP, SMALLEST, POWER)
        tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


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
    quantized_out: QuantizedOutput | None = None,
) -> None:
    """Run the whole step in one kernel, without making the host wait for the device."""
    on_device = isinstance(lr, Tensor) or isinstance(step, Tensor)
    scalars = None
    rate, step_size, root_correction = 0.0, 0.0, 0.0
    if on_device:  # bias corrections in float64, as on the host: 1 - beta**step loses digits in float32
        rates = torch.as_tensor(lr, dtype=torch.float64, device=param.device)
        count = torch.as_tensor(step, dtype=torch.float64, device=param.device)
        scalars = torch.stack((rates, rates / (1 - beta1**count), (1 - beta2**count).rsqrt(), count)).float()
        shift = STEPS
    else:
        shift = wrapped(int(step) * STEPS)
        rate = float(lr)
        step_size, root_correction = rate / (1 - beta1 ** float(step)), (1 - beta2 ** float(step)) ** -0.5
    if not param.numel():
        return
    given = quantized_out
    _step[(cdiv(param.numel(), BLOCK),)](
        param, grad, exp_avg, exp_avg_sq, *exponents, out if given is None else given.data,
        None if given is None else given.amax,
        None if given is None or given.largest is None else given.largest.view(torch.int32),
        None if grad_scale is None else grad_scale.float(), scalars, param.numel(), rate, step_size, root_correction,
        # The rests in float64 on the host. In the kernel, 1 - 0.999 in float32 would be wrong in the fifth digit.
        beta1, beta2, 1 - beta1, 1 - beta2, eps, float(weight_decay), shift,
        FIRST=_form(exp_avg, exponents[0]), SECOND=_form(exp_avg_sq, exponents[1]), DECOUPLED=decoupled,
        SCALED=grad_scale is not None, COPY=out is not None, QUANTIZE_OUT=given is not None,
        TELL=given is not None and given.largest is not None,
        BEFORE=TYPES[torch.float32 if given is None else given.rounded],
        TOP=1.0 if given is None else LARGEST[given.scheme.format], SMALLEST=TINY,
        POWER=given is not None and given.scheme.scale == "power", ON_DEVICE=on_device, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _form(moment: Tensor, exponents: Tensor | None) -> int:
    """Return how a moment is stored."""
    if exponents is not None:
        return int(QUANTIZED.value)
    return int((ROUNDED if moment.dtype == torch.bfloat16 else FLOATS).value)
