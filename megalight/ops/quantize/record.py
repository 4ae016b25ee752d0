"""The largest of some magnitudes, kept where an earlier one stands if it is larger."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from megalight.ops.common import lazy, triton_why_not

_kernel = lazy("megalight.ops.quantize.record_triton", "record_largest")


def record_largest(kept: Tensor, magnitudes: Tensor) -> None:
    """``kept = max(kept, largest of magnitudes)`` in place, both float32: ``kept`` 0-dim, ``magnitudes`` of any shape.

    On a GPU this is one kernel, which ignores NaN. Without magnitudes nothing happens.
    """
    if magnitudes.numel():
        _choose(kept.device.type)(kept, magnitudes)


@lru_cache
def _choose(device: str) -> Callable[[Tensor, Tensor], None]:
    found: Callable[[Tensor, Tensor], None] = _record if triton_why_not(device) else _kernel.imported()  # type: ignore[attr-defined]
    return found


def _record(kept: Tensor, magnitudes: Tensor) -> None:
    torch.maximum(kept, magnitudes.max(), out=kept)
