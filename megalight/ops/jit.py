"""The one place that imports Triton. Modules with kernels import it from here, and are imported at their first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from megalight.imports import require

triton: Any = require("triton", "a Triton kernel")
tl: Any = require("triton.language", "a Triton kernel")
jit: Callable[[Callable[..., Any]], Any] = triton.jit

# Names for annotations in kernels: Triton looks up every name there and accepts only its own.
if TYPE_CHECKING:
    Value: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    Value = tl.tensor
    constexpr = tl.constexpr

UNIT = 16
"""Elements at most that a load need take at once.

Triton sees by itself which arguments 16 divides, and nothing of other ones, such as the 3,420 features in the tower of
Qwen2.5-VL: loads of them take one element at a time. So kernels get sizes and strides in units of
``math.gcd(size, stride, UNIT)``, and the unit as a constant: loads then take as many elements.
"""

LOG2E: Any = tl.constexpr(1.4426950408889634)
"""``log2(e)``: on a GPU, powers of 2 take fewer instructions than those of e."""


def cdiv(n: int, size: int) -> int:
    """Return the number of blocks of ``size`` that hold ``n``. (On the host, ``triton.cdiv`` costs a microsecond.)"""
    # Floor division of the negative rounds up.
    return -(-n // size)


@lru_cache
def next_power(n: int) -> int:
    """Return the smallest power of two that is at least ``n``: Triton's block shapes must be powers of two."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
