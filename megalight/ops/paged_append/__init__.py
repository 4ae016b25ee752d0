"""Append to pools: queries and keys are rotated, keys and values of new tokens are stored in rows of their pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.rotary import reference_apply_rotary
from megalight.registry import Backend, BackendRegistry, remembered


def reference_paged_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    write: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> Tensor:
    """See :func:`paged_append`."""
    if cos is not None and sin is not None:
        q, k = (reference_apply_rotary(t, cos, sin, interleaved) for t in (q, k))
    with torch.no_grad():
        k_pool[write], v_pool[write] = k, v
    return q


class PagedAppendSpec(NamedTuple):
    """A request: device type, and dtype of the heads."""

    device: str
    dtype: torch.dtype


PAGED_APPEND: BackendRegistry[PagedAppendSpec, Callable[..., Tensor]] = BackendRegistry("paged_append")
REGISTRIES: tuple[BackendRegistry[PagedAppendSpec, Any], ...] = (PAGED_APPEND,)
EXAMPLE = PagedAppendSpec("cpu", torch.bfloat16)


def _triton_why_not(spec: PagedAppendSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


_triton = lazy("megalight.ops.paged_append.triton", "paged_append")
PAGED_APPEND.register(Backend("triton", _triton, 20, _triton_why_not))
PAGED_APPEND.register(Backend("reference", reference_paged_append, 0, serve_all))


@remembered
def _choose(spec: PagedAppendSpec, backend: str) -> Callable[..., Tensor]:
    return PAGED_APPEND.select(spec, backend).fn


def paged_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    write: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Rotate queries and keys, and store keys and values; return the queries, in one pass. It has no gradient.

    Args:
        q: ``[T, H, D]``; it may be a part of a wider projection, as ``k`` and ``v``.
        k: ``[T, Hkv, D]``.
        v: ``[T, Hkv, Dv]``.
        k_pool: ``[N, Hkv, D]``, contiguous. Keys are stored after their rotation, so that later passes need no angles.
        v_pool: ``[N, Hkv, Dv]``, contiguous.
        write: ``[T]`` int64: the row of each token (:class:`~megalight.types.Pages`).
        cos: ``[T, r/2]``, from :func:`~megalight.ops.rotary.rotary_table`; None: nothing is rotated.
        sin: ``[T, r/2]``.
        interleaved: as in :func:`~megalight.ops.rotary.apply_rotary`.
        backend: name of a backend.
    """
    fn = _choose(PagedAppendSpec(q.device.type, q.dtype), backend)
    return fn(q, k, v, k_pool, v_pool, write, cos, sin, interleaved)
