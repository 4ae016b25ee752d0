"""Activation functions, plain and gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.errors import nearest
from megalight.ops.activation import native, reference
from megalight.ops.common import lazy, select, serve_all, triton_why_not
from megalight.registry import Backend, BackendRegistry, remembered

KINDS: tuple[str, ...] = tuple(reference.KINDS)
"""Names of the known activations."""


class Spec(NamedTuple):
    """A request to an activation: device type, dtype of the input, name of the activation."""

    device: str
    dtype: torch.dtype
    kind: str


GATED: BackendRegistry[Spec, Callable[[Tensor, str], Tensor]] = BackendRegistry("gated")
ACTIVATION: BackendRegistry[Spec, Callable[[Tensor, str], Tensor]] = BackendRegistry("activation")
REGISTRIES: tuple[BackendRegistry[Spec, Any], ...] = (GATED, ACTIVATION)
EXAMPLE = Spec("cpu", torch.bfloat16, "silu")


def _triton_why_not(spec: Spec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


_TRITON = "megalight.ops.activation.triton"
GATED.register(Backend("triton", lazy(_TRITON, "gated", measures=True), 20, _triton_why_not))
GATED.register(Backend("torch", native.gated, 10, serve_all))
GATED.register(Backend("reference", reference.gated, 0, serve_all))
ACTIVATION.register(Backend("triton", lazy(_TRITON, "activation", measures=True), 20, _triton_why_not))
ACTIVATION.register(Backend("torch", native.activation, 10, serve_all))
ACTIVATION.register(Backend("reference", reference.activation, 0, serve_all))


@remembered
def _choose(
    registry: BackendRegistry[Spec, Callable[[Tensor, str], Tensor]], spec: Spec, backend: str
) -> Callable[[Tensor, str], Tensor]:
    if spec.kind not in KINDS:
        raise ValueError(f"unknown activation {spec.kind!r}; known: {', '.join(KINDS)}.{nearest(spec.kind, KINDS)}")
    return select(registry, spec, backend)


def gated(x: Tensor, kind: str = "silu", backend: str = "auto") -> Tensor:
    """``act(x[..., :f]) * x[..., f:]`` for ``x [..., 2f]``: SwiGLU and variants (Shazeer 2020). Returns ``[..., f]``.

    A :func:`~megalight.ops.common.measuring` backend also finds the largest magnitudes of the result and of the
    gradient of ``x``, for later casts to 8 bits.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    out: Tensor = _choose(GATED, Spec(x.device.type, x.dtype, kind), backend)(x, kind)
    return out


def activation(x: Tensor, kind: str, backend: str = "auto") -> Tensor:
    """``act(x)``, element by element; a measuring backend finds magnitudes as in :func:`gated`.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    out: Tensor = _choose(ACTIVATION, Spec(x.device.type, x.dtype, kind), backend)(x, kind)
    return out
