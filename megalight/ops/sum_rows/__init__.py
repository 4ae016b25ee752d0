"""Sum the rows of a matrix, such as the gradient of a bias, into memory that may have a sum already."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.sum_rows import reference
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """A request: device type, dtype of the rows, dtype of the sum."""

    device: str
    dtype: torch.dtype
    out_dtype: torch.dtype


SUM_ROWS: BackendRegistry[Spec, Callable[..., None]] = BackendRegistry("sum_rows")
REGISTRIES = (SUM_ROWS,)
EXAMPLE = Spec("cpu", torch.bfloat16, torch.float32)


def _triton_why_not(spec: Spec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.out_dtype)


SUM_ROWS.register(Backend("triton", lazy("megalight.ops.sum_rows.triton", "sum_rows"), 20, _triton_why_not))
SUM_ROWS.register(Backend("reference", reference.sum_rows, 0, serve_all))


@remembered
def _choose(spec: Spec, backend: str) -> Callable[..., None]:
    return SUM_ROWS.select(spec, backend).fn


def sum_rows(out: Tensor, rows: Tensor, *, add: bool, backend: str = "auto") -> None:
    """Sum ``rows [n, size]`` in float32 or wider, and write the sum to ``out [size]``, or add it.

    The order of the sum is fixed by the shapes: every run gives the same bits.

    Args:
        out: ``[size]``.
        rows: ``[n, size]``; there may be none.
        add: add the sum to ``out`` instead of overwriting it.
        backend: a backend's name, or ``auto``.

    Raises:
        BackendError: the named backend cannot serve these dtypes on this device.
    """
    _choose(Spec(rows.device.type, rows.dtype, out.dtype), backend)(out, rows, add)
