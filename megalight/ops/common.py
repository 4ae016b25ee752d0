"""Helpers that all ops share: accumulation dtypes, and the requirements of GPU kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalight.imports import has
from megalight.registry import BackendRegistry, remembered

SpecT = TypeVar("SpecT")
# Dtypes with too few bits to add up many values in.
HALF = (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over values of ``dtype``: float32 for half dtypes, else the dtype itself."""
    return torch.float32 if dtype in HALF else dtype


def without_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which products keep their dtype: autocast would round the state of a scan in every chunk."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def serve_all(spec: object) -> None:
    """Return None: a backend that supports everything."""


def heads_why_not(dtype: torch.dtype, head_dim: int, value_dim: int, widest: int) -> str | None:
    """Return why attention kernels for equal half-precision heads up to ``widest`` features cannot serve, or None."""
    if dtype not in HALF:
        return f"serves bfloat16 and float16, not {dtype}"
    # Kernels read heads in vectors of 16 bytes: 8 half-precision features.
    if head_dim != value_dim or head_dim % 8 or head_dim > widest:
        return f"needs equal key and value heads of a multiple of 8 up to {widest}, not {head_dim}, {value_dim}"
    return None


@lru_cache
def triton_heads_why_not(device: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Return why the Triton kernels of attention cannot serve heads of these sizes, or None."""
    sizes = (head_dim, value_dim)
    if dtype not in HALF or max(sizes) > 256 or any(size % 8 for size in sizes):
        return f"needs heads of multiples of 8 up to 256 in half types, not {sizes} in {dtype}"
    if (reason := cuda_why_not(device) or triton_why_not(device, dtype)) is not None:
        return reason
    # Loads by descriptors; blocks are chosen for Hopper.
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 9 else f"needs a GPU of compute capability 9.0, not {major}.{minor}"


def whole_why_not(divided: bool) -> str | None:
    """Return why a kernel cannot norm a row that is a part (``divided``) of what is normalized together, or None."""
    return "norms whole rows, and these are parts of rows that are divided over devices" if divided else None


@lru_cache
def cuda_why_not(device: str) -> str | None:
    """Return why a CUDA kernel cannot be used for tensors on ``device`` (a device type), or None."""
    if device != "cuda":
        return f"needs tensors on cuda, not on {device}"
    return None if torch.cuda.is_available() else "needs a CUDA device, and none is here"


@lru_cache
def triton_why_not(device: str, *dtypes: torch.dtype) -> str | None:
    """Return why Triton kernels cannot be used for tensors on ``device`` (a device type) with ``dtypes``, or None."""
    strange = [str(dtype) for dtype in dtypes if dtype not in (*HALF, torch.float32)]
    if strange:
        return f"serves bfloat16, float16 and float32, not {', '.join(strange)}"
    # The device first: without a GPU, triton is not worth installing.
    return cuda_why_not(device) or (None if has("triton") else "needs the package triton")


@lru_cache
def fp8_why_not(device: str) -> str | None:
    """Return why a Triton kernel cannot convert from and to e4m3 on ``device`` (a device type), or None."""
    capable = device != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
    return None if capable else "needs a GPU of compute capability 8.9 for e4m3"


@lru_cache
def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a device; 4 on the CPU, where Triton interprets kernels."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def lazy(module: str, name: str, *, measures: bool = False) -> Callable[..., Any]:
    """Return the function ``name`` of ``module``, which is imported at the first call, as Triton may be absent.

    ``measures``: the function has an argument ``measure``, which :func:`select` sets.
    """

    @lru_cache(maxsize=1)
    def find() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found

    def call(*args: Any, **kwargs: Any) -> Any:
        return find()(*args, **kwargs)

    call.measures = measures  # type: ignore[attr-defined]
    call.imported = find  # type: ignore[attr-defined]
    return call


AMAX = "+amax"
"""Suffix of the name of a backend that also finds largest magnitudes (:mod:`megalight.ops.quantize.amax_history`)."""


def measuring(backend: str, wanted: bool = True) -> str:
    """Return the name of the same backend with or without magnitudes: ``auto`` becomes ``auto+amax``."""
    return backend.removesuffix(AMAX) + AMAX * wanted


def last_contiguous(x: Tensor) -> Tensor:
    """Return ``x`` with a contiguous last dim; rows may lie apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


@remembered
def choose_measured(
    registry: BackendRegistry[SpecT, Callable[..., Any]], spec: SpecT, backend: str
) -> Callable[..., Any]:
    """Return the function of a backend; it also finds magnitudes if the name requests this and the backend can."""
    fn = registry.select(spec, backend.removesuffix(AMAX)).fn
    if not (backend.endswith(AMAX) and getattr(fn, "measures", False)):
        return fn
    return partial(fn.imported() if hasattr(fn, "imported") else fn, measure=True)


def mask(length: int, keys: int, causal: bool, window: int | None, device: torch.device | str = "cpu") -> Tensor | None:
    """``[length, keys]``: True where a query sees a key. Queries are the last ``length`` positions of the keys.

    Returns None if every query sees every key.
    """
    if not causal and window is None:
        return None
    # Bottom-right: with keys in a cache, the first query is not at position 0.
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance <= window
    return allowed


def softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax of ``scores [..., H, Tq, Tk]``; ``e^sink`` of each head ``[H]`` is one more term of the denominator."""
    if sink is None:
        return scores.softmax(-1)
    # a last column, which has no value; so the maximum that is subtracted includes it
    column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
