"""The one place that imports Triton: modules with kernels import it from here.

Without Triton, kernels are defined all the same, and launching one says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from megalight.errors import MissingPackageError
from megalight.imports import require


class AbsentKernel:
    """Stands for a kernel where Triton is not installed: ``kernel[grid]`` raises."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __getitem__(self, grid: Any) -> Any:
        return require("triton", "a Triton kernel")  # raises


class _Constant:
    """Stands for ``tl.constexpr``, which holds a value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Absent:
    """Stands for Triton and its language where it is not installed: what modules read when they define kernels."""

    @staticmethod
    def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Serve as ``@triton.jit`` and as ``@triton.jit(...)``."""
        return AbsentKernel if fn is None else AbsentKernel(fn)

    constexpr = _Constant

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


triton: Any
tl: Any
try:
    triton = require("triton", "a Triton kernel")
    tl = require("triton.language", "a Triton kernel")
except MissingPackageError:
    triton = tl = _Absent()
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


class _Overlap:
    """Whether kernels that call :func:`start_dependents` are launched before their predecessor has ended (``on``)."""

    on = False


OVERLAP = _Overlap()


@contextmanager
def overlapping(device: torch.device) -> Iterator[None]:
    """Launch kernels that call :func:`start_dependents` before their predecessor has ended, on GPUs that can.

    For recordings of inference: there many kernels take a few microseconds each, of which one or two are the way from
    one to the next. Weights that another kernel has just written may not be read.
    """
    before = OVERLAP.on
    OVERLAP.on = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    try:
        yield
    finally:
        OVERLAP.on = before


@jit
def start_dependents(PDL: constexpr) -> None:
    """Wait until the kernel before this one has ended and its results are visible; let the next one begin.

    With ``PDL``, which is :data:`OVERLAP`, as is the option ``launch_pdl`` (programmatic dependent launch).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def sigmoid(x: Value) -> Value:
    """Return ``1 / (1 + exp(-x))`` of float32 values, within some units of the last digit.

    Division and powers of e take further instructions for numbers near the ends of their range. A power of 2 and a
    reciprocal root do not; where the power overflows, the root is 0, as is the result.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root
