"""Triton, behind one door: kernels import it from here, and are themselves imported at their first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from megalight.imports import require

triton: Any = require("triton", "a Triton kernel")
tl: Any = require("triton.language", "a Triton kernel")
jit: Callable[[Callable[..., Any]], Any] = triton.jit

# Names for annotations inside kernels, where Triton looks every name up and accepts its own only.
if TYPE_CHECKING:
    Value: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    Value = tl.tensor
    constexpr = tl.constexpr


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; 4 where Triton interprets its kernels on the CPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def cdiv(n: int, size: int) -> int:
    """How many blocks of ``size`` hold ``n``. (``triton.cdiv`` is for kernels: on the host it costs a microsecond.)"""
    return -(-n // size)


def next_power(n: int) -> int:
    """The smallest power of two that is at least ``n``: block shapes must be powers of two."""
    return 1 << max(0, n - 1).bit_length()
