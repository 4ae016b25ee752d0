"""Moments of Adam in 16 or 8 bits, rounded at random, so that small changes are not lost.

A moment in 16 bits is bfloat16. One in 8 bits is a float of three mantissa bits, and blocks of :data:`BLOCK` elements
share the highest exponent that their codes reach. A first moment has a sign, and four bits for 16 octaves below that
exponent. A second moment has none: its root is stored, in 32 octaves, and is never rounded to 0, so that no update is
divided by 0.

A value is rounded up with a probability that is its distance to the value below. The random number is a hash of the
value and of the step. So it needs no state, is the same on each device and in each layout, and a resumed run repeats
it. Without this, a second moment would never fall in 16 bits: 0.999 of it rounds back to all of it.

All formats hold their values exactly in bfloat16, which is how checkpoints and other formats read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Elements that share an exponent. Parameters in flat buffers begin at multiples of it: no block has parts of two."""

MULTIPLIER, STEPS = -1640531535, -2048144789
"""Odd numbers, as int32, that spread bits of values and of steps over the high bits of a product."""

HALF_BITS, CODE_BITS = 16, 20
"""Bits of a float32 that bfloat16 and codes leave out."""
LOWEST = 32
"""Codes go no further down than 32 octaves, so exponents are at least this: a smaller code would have none."""

MAGNITUDE = (1 << 31) - 1
"""All bits but the sign."""


def exponents_like(codes: Tensor) -> Tensor:
    """Make room for the exponents of codes: uint8, ``[ceil(n / BLOCK)]``, zero as all codes are at first."""
    return torch.zeros(-(-codes.numel() // BLOCK), dtype=torch.uint8, device=codes.device)


def half(values: Tensor, step: float | Tensor | None) -> Tensor:
    """Round values to bfloat16: at random if there is a step, else to the nearest one."""
    if step is None:
        return values.to(torch.bfloat16)
    bits = values.float().view(torch.int32)
    kept = (bits + _noise(bits, step, HALF_BITS)) & -(1 << HALF_BITS)
    return kept.view(torch.float32).to(torch.bfloat16)


def encode(values: Tensor, codes: Tensor, exponents: Tensor, second: bool, step: float | Tensor | None) -> None:
    """Round values to codes: at random if there is a step, else to the nearest ones.

    Args:
        values: floating point, contiguous.
        codes: uint8, as many; written.
        exponents: those of its blocks (:func:`exponents_like`); written.
        second: a second moment, which is not negative.
    """
    values = values.reshape(-1).float()
    bits = values.view(torch.int32)
    # From the bits before the root, whose last one differs between libraries.
    rounding = 1 << (CODE_BITS - 1) if step is None else _noise(bits, step, CODE_BITS)
    size = values.sqrt().view(torch.int32) if second else bits & MAGNITUDE
    # Sign and mantissa aside, these are the three highest bits of the mantissa under the exponent.
    steps = (size + rounding) >> CODE_BITS
    blocks = torch.nn.functional.pad(steps, (0, -len(steps) % BLOCK)).view(-1, BLOCK)
    highest = (blocks.amax(1) >> 3).clamp_(LOWEST, 255)
    exponents.copy_(highest)
    limit = 255 if second else 127
    found = (blocks - (highest * 8 + 7 - limit)[:, None]).view(-1)[: len(steps)].clamp_(0, limit)
    if second:
        found = found.clamp_(min=1).mul_(size > 0)
    else:
        found |= (bits < 0).int() << 7
    codes.view(-1).copy_(found)


def decode(codes: Tensor, exponents: Tensor, second: bool) -> Tensor:
    """Return the values of codes, float32, in their shape."""
    limit = 255 if second else 127
    found = codes.view(-1).int()
    size = found & limit
    highest = exponents.int().repeat_interleave(BLOCK)[: len(found)]
    values = torch.where(size > 0, (size + (highest * 8 + 7 - limit)) << CODE_BITS, 0).view(torch.float32)
    values = values.square() if second else torch.where(found > 127, -values, values)
    return values.view(codes.shape)


def read(moment: Tensor, exponents: Tensor | None, second: bool) -> Tensor:
    """Return a moment's values: floating-point ones as they are, those of codes in float32."""
    return moment if exponents is None else decode(moment, exponents, second)


def write(
    moment: Tensor, exponents: Tensor | None, values: Tensor, second: bool, step: float | Tensor | None = None
) -> None:
    """Store values in a moment, rounded to its format: at random if there is a step, else to the nearest ones."""
    if exponents is not None:
        encode(values, moment, exponents, second, step)
    elif moment.dtype == torch.bfloat16:
        moment.copy_(half(values, step))
    else:
        moment.copy_(values)


def _noise(bits: Tensor, step: float | Tensor, width: int) -> Tensor:
    """Return random numbers of ``width`` bits, which follow from the bits of values and the step."""
    shift = step.to(bits.device, torch.int32) * STEPS if isinstance(step, Tensor) else wrapped(int(step) * STEPS)
    # A product's high bits depend on all bits below them. int32 wraps around.
    return (((bits + shift) * MULTIPLIER) >> (32 - width)) & ((1 << width) - 1)


def wrapped(number: int) -> int:
    """Return a number modulo 2^32, as an int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
