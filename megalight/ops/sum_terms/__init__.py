"""Sum one term of each rank, in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.sum_terms import reference
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """A request: device type, dtype of the terms, dtype of the sum."""

    device: str
    dtype: torch.dtype
    out_dtype: torch.dtype


SUM_TERMS: BackendRegistry[Spec, Callable[..., None]] = BackendRegistry("sum_terms")
REGISTRIES = (SUM_TERMS,)
EXAMPLE = Spec("cpu", torch.bfloat16, torch.float32)


def _triton_why_not(spec: Spec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.out_dtype)


SUM_TERMS.register(Backend("triton", lazy("megalight.ops.sum_terms.triton", "sum_terms"), 20, _triton_why_not))
SUM_TERMS.register(Backend("reference", reference.sum_terms, 0, serve_all))


@remembered
def _choose(spec: Spec, backend: str) -> Callable[..., None]:
    return SUM_TERMS.select(spec, backend).fn


def sum_terms(
    out: Tensor, own: Tensor, others: Sequence[Tensor], place: int, *, add: bool = False, backend: str = "auto"
) -> None:
    """Sum terms in the order of ranks, in float32 or wider, and round once. So every run gives the same sum.

    Args:
        out: ``[n]``, where the sum goes. It may be the memory of ``own``.
        own: ``[n]``, the term of this rank.
        others: ``[n]`` each, the terms of the other ranks, in the order of ranks. They have the dtype of ``own``, and
            lie at equal distances in one memory.
        place: the rank of ``own``: how many of ``others`` come before it.
        add: add the sum to ``out`` instead.
        backend: a backend's name, or ``auto``.

    Raises:
        BackendError: the named backend cannot serve these dtypes on this device.
    """
    _choose(Spec(own.device.type, own.dtype, out.dtype), backend)(out, own, others, place, add)
