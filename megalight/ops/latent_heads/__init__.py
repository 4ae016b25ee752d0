"""Heads of latent attention (https://arxiv.org/abs/2405.04434): queries whose last features turn, and joined keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.latent_heads import reference
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """A request: device type, and dtype of the heads."""

    device: str
    dtype: torch.dtype


ROTATE_TAIL: BackendRegistry[Spec, Callable[..., Tensor]] = BackendRegistry("rotate_tail")
JOIN_KEYS: BackendRegistry[Spec, Callable[..., tuple[Tensor, Tensor]]] = BackendRegistry("join_keys")
REGISTRIES: tuple[BackendRegistry[Spec, Any], ...] = (ROTATE_TAIL, JOIN_KEYS)
EXAMPLE = Spec("cpu", torch.bfloat16)


def _triton_why_not(spec: Spec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


_TRITON = "megalight.ops.latent_heads.triton"
ROTATE_TAIL.register(Backend("triton", lazy(_TRITON, "rotate_tail"), 20, _triton_why_not))
ROTATE_TAIL.register(Backend("reference", reference.rotate_tail, 0, serve_all))
JOIN_KEYS.register(Backend("triton", lazy(_TRITON, "join_keys"), 20, _triton_why_not))
JOIN_KEYS.register(Backend("reference", reference.join_keys, 0, serve_all))


@remembered
def _choose(registry: BackendRegistry[Spec, Callable[..., Any]], spec: Spec, backend: str) -> Callable[..., Any]:
    return registry.select(spec, backend).fn


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, backend: str = "auto") -> Tensor:
    """Rotate the last ``r = 2 * cos.shape[-1]`` features of every head, in one pass.

    Args:
        x: ``[T, H, D]``.
        cos: ``[T, r/2]``, from :func:`~megalight.ops.rotary.rotary_table`.
        sin: ``[T, r/2]``.
        interleaved: as in :func:`~megalight.ops.rotary.apply_rotary`.
        backend: name of a backend.
    """
    out: Tensor = _choose(ROTATE_TAIL, Spec(x.device.type, x.dtype), backend)(x, cos, sin, interleaved)
    return out


def join_keys(wide: Tensor, key: Tensor, head_dim: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Split keys from values, and append the features that all key heads share.

    Args:
        wide: ``[T, H, D + V]``, the keys' own features and the values.
        key: ``[T, R]``, the shared features.
        head_dim: ``D``.
        backend: name of a backend.

    Returns:
        keys ``[T, H, D + R]`` and values ``[T, H, V]``, which are a view of ``wide``.
    """
    fn = _choose(JOIN_KEYS, Spec(wide.device.type, wide.dtype), backend)
    out: tuple[Tensor, Tensor] = fn(wide, key, head_dim)
    return out
