"""Append to pools: queries and keys are rotated, keys and values of new tokens are stored in rows of their pools.

Pools of e4m3 have half the bytes of bfloat16. Each head of each token has a float32 scale, which maps its largest
magnitude to 448: nothing is calibrated, and rows that are stored are never scaled anew.

Latents of MLA in e4m3 have one scale for each token, and their rotated keys, which scores are sensitive to, keep the
dtype of the layer, as in SnapMLA (https://arxiv.org/abs/2602.10718): 644 bytes in place of 1,152 with 512 and 64
features in bfloat16. The scale multiplies scores and weights, not 512 features, as scales of 128 features each would
(the format of sparse FlashMLA). Those are no more accurate: e4m3 has an exponent, so its relative error is the same
for values from 448 to 2 ** -6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import fp8_why_not, lazy, serve_all, triton_why_not
from megalight.ops.quantize.formats import LARGEST, to_fp8
from megalight.ops.rotary import reference_apply_rotary
from megalight.registry import Backend, BackendRegistry, choose


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
    scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """See :func:`paged_append`."""
    if cos is not None and sin is not None:
        q, k = (reference_apply_rotary(t, cos, sin, interleaved) for t in (q, k))
    with torch.no_grad():
        if scales is None:
            k_pool[write], v_pool[write] = k, v
        else:
            for rows, pool, scale in zip((k, v), (k_pool, v_pool), scales, strict=True):
                data, scale[write] = quantize_heads(rows)
                # As bytes: not all devices index floats of 8 bits.
                pool.view(torch.uint8)[write] = data.view(torch.uint8)
    return q


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., D] -> [..., D]`` in e4m3, and its scales ``[...]`` in float32: ``x`` is about their product."""
    wide = x.float()
    scale = wide.abs().amax(-1) / LARGEST["e4m3"]
    scale = torch.where(scale == 0, 1.0, scale)
    return to_fp8(wide / scale[..., None], "e4m3"), scale


def dequantize_heads(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values ``[..., D]`` that quantized values with scales ``[...]`` stand for."""
    return data.to(dtype) * scale[..., None].to(dtype)


def reference_append_latents(
    latent: Tensor, key: Tensor, latent_pool: Tensor, rotary_pool: Tensor, scales: Tensor, write: Tensor
) -> None:
    """See :func:`append_latents`."""
    with torch.no_grad():
        data, scales[write] = quantize_heads(latent)
        latent_pool.view(torch.uint8)[write] = data.view(torch.uint8)
        rotary_pool[write] = key


class PagedAppendSpec(NamedTuple):
    """A request: device type, dtype of the heads, and whether pools are of e4m3."""

    device: str
    dtype: torch.dtype
    quantized: bool = False


PAGED_APPEND: BackendRegistry[PagedAppendSpec, Callable[..., Tensor]] = BackendRegistry("paged_append")
APPEND_LATENTS: BackendRegistry[PagedAppendSpec, Callable[..., None]] = BackendRegistry("append_latents")
REGISTRIES: tuple[BackendRegistry[PagedAppendSpec, Any], ...] = (PAGED_APPEND, APPEND_LATENTS)
EXAMPLE = PagedAppendSpec("cpu", torch.bfloat16)


def _triton_why_not(spec: PagedAppendSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype) or (fp8_why_not(spec.device) if spec.quantized else None)


_triton = lazy("megalight.ops.paged_append.triton", "paged_append")
PAGED_APPEND.register(Backend("triton", _triton, 20, _triton_why_not))
PAGED_APPEND.register(Backend("reference", reference_paged_append, 0, serve_all))
_triton_latents = lazy("megalight.ops.paged_append.triton", "append_latents")
APPEND_LATENTS.register(Backend("triton", _triton_latents, 20, _triton_why_not))
APPEND_LATENTS.register(Backend("reference", reference_append_latents, 0, serve_all))


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
    scales: tuple[Tensor, Tensor] | None = None,
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
        scales: ``[N, Hkv]`` float32 of pools in e4m3, for keys and for values. None: the pools have the dtype of ``k``.
        backend: name of a backend.
    """
    fn = choose(PAGED_APPEND, PagedAppendSpec(q.device.type, q.dtype, scales is not None), backend)
    return fn(q, k, v, k_pool, v_pool, write, cos, sin, interleaved, scales)


def append_latents(
    latent: Tensor,
    key: Tensor,
    latent_pool: Tensor,
    rotary_pool: Tensor,
    scales: Tensor,
    write: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Store latents of MLA in e4m3, and their rotated keys as they are, in one pass. It has no gradient.

    Args:
        latent: ``[T, c]``, normed.
        key: ``[T, R]``, rotated; it may be a part of a wider projection.
        latent_pool: ``[N, c]`` in e4m3, contiguous.
        rotary_pool: ``[N, R]`` in the dtype of ``key``, contiguous.
        scales: ``[N]`` float32.
        write: ``[T]`` int64: the row of each token (:class:`~megalight.types.Pages`).
        backend: name of a backend.
    """
    spec = PagedAppendSpec(latent.device.type, latent.dtype, quantized=True)
    choose(APPEND_LATENTS, spec, backend)(latent, key, latent_pool, rotary_pool, scales, write)
