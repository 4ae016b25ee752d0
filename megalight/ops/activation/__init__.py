"""Activation functions, plain and gated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.errors import nearest
from megalight.ops.common import choose_measured, lazy, serve_all, triton_why_not, wide
from megalight.registry import Backend, BackendRegistry, remembered


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


REFERENCE_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
"""Name -> formula. ``gelu`` is exact (erf), ``gelu_tanh`` GPT-2's, ``quick_gelu`` CLIP's, ``squared_relu`` Primer's."""


def reference_activation(x: Tensor, kind: str) -> Tensor:
    """``act(x)``."""
    return REFERENCE_KINDS[kind](x.to(wide(x.dtype))).to(x.dtype)


def reference_gated(x: Tensor, kind: str) -> Tensor:
    """``act(gate) * up`` with ``x = gate | up`` along the last dim."""
    gate, up = x.to(wide(x.dtype)).chunk(2, -1)
    return (REFERENCE_KINDS[kind](gate) * up).to(x.dtype)


def reference_gated_pair(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``act(gate) * up``."""
    dtype = wide(gate.dtype)
    return (REFERENCE_KINDS[kind](gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def weighted(x: Tensor, kind: str, gates: bool, weights: Tensor | None, offset: float, clamp: float | None) -> Tensor:
    """``act(gate) * (up + offset) * weights`` with clamped halves, or ``act(x) * weights``."""
    wide_x = x.to(wide(x.dtype))
    if gates:
        gate, up = wide_x.chunk(2, -1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        y = REFERENCE_KINDS[kind](gate) * (up + offset)
    else:
        y = REFERENCE_KINDS[kind](wide_x)
    if weights is not None:
        y = y * weights.to(y.dtype).unsqueeze(-1)
    return y.to(x.dtype)


TORCH_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def torch_activation(x: Tensor, kind: str) -> Tensor:
    """``act(x)``."""
    return TORCH_KINDS[kind](x)


def torch_gated(x: Tensor, kind: str) -> Tensor:
    """``act(gate) * up`` with ``x = gate | up`` along the last dim."""
    gate, up = x.chunk(2, -1)
    return TORCH_KINDS[kind](gate) * up


def torch_gated_pair(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``act(gate) * up``."""
    return TORCH_KINDS[kind](gate) * up


KINDS: tuple[str, ...] = tuple(REFERENCE_KINDS)
"""Names of the known activations."""


class ActivationSpec(NamedTuple):
    """A request to an activation: device type, dtype of the input, name of the activation."""

    device: str
    dtype: torch.dtype
    kind: str


GATED: BackendRegistry[ActivationSpec, Callable[[Tensor, str], Tensor]] = BackendRegistry("gated")
ACTIVATION: BackendRegistry[ActivationSpec, Callable[[Tensor, str], Tensor]] = BackendRegistry("activation")
WEIGHTED: BackendRegistry[ActivationSpec, Callable[..., Tensor]] = BackendRegistry("weighted_activation")
GATED_PAIR: BackendRegistry[ActivationSpec, Callable[[Tensor, Tensor, str], Tensor]] = BackendRegistry("gated_pair")
REGISTRIES: tuple[BackendRegistry[ActivationSpec, Any], ...] = (GATED, ACTIVATION, WEIGHTED, GATED_PAIR)
EXAMPLE = ActivationSpec("cpu", torch.bfloat16, "silu")


def _triton_why_not(spec: ActivationSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


_TRITON = "megalight.ops.activation.triton"
GATED.register(Backend("triton", lazy(_TRITON, "gated", measures=True), 20, _triton_why_not))
GATED.register(Backend("torch", torch_gated, 10, serve_all))
GATED.register(Backend("reference", reference_gated, 0, serve_all))
ACTIVATION.register(Backend("triton", lazy(_TRITON, "activation", measures=True), 20, _triton_why_not))
ACTIVATION.register(Backend("torch", torch_activation, 10, serve_all))
ACTIVATION.register(Backend("reference", reference_activation, 0, serve_all))
WEIGHTED.register(Backend("triton", lazy("megalight.ops.activation.triton", "weighted"), 20, _triton_why_not))
WEIGHTED.register(Backend("reference", weighted, 0, serve_all))
GATED_PAIR.register(Backend("triton", lazy("megalight.ops.activation.triton", "gated_pair"), 20, _triton_why_not))
GATED_PAIR.register(Backend("torch", torch_gated_pair, 10, serve_all))
GATED_PAIR.register(Backend("reference", reference_gated_pair, 0, serve_all))


@remembered
def _choose(
    registry: BackendRegistry[ActivationSpec, Any], spec: ActivationSpec, backend: str
) -> Callable[..., Tensor]:
    if spec.kind not in KINDS:
        raise ValueError(f"unknown activation {spec.kind!r}; known: {', '.join(KINDS)}.{nearest(spec.kind, KINDS)}")
    return choose_measured(registry, spec, backend)


def gated(
    x: Tensor,
    kind: str = "silu",
    backend: str = "auto",
    *,
    weights: Tensor | None = None,
    offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor:
    """``act(x[..., :f]) * x[..., f:]`` for ``x [..., 2f]``: SwiGLU and variants (Shazeer 2020). Returns ``[..., f]``.

    A :func:`~megalight.ops.common.measuring` backend also finds the largest magnitudes of the result and of the
    gradient of ``x``, for later casts to 8 bits; not with the options below.

    Args:
        x: ``[..., 2 f]``, gate and up.
        kind: a name in :data:`KINDS`.
        backend: backend of the op.
        weights: ``[...]``, one factor per row, such as a routing probability; it gets a gradient.
        offset: added to up (1 in GPT-OSS).
        clamp: first limit gate to at most this, and up to plus or minus this. Beyond, the gradient is zero.

    Raises:
        ValueError: ``kind`` is unknown, ``clamp`` is not positive, or ``weights`` has another shape.
    """
    # The plain form has more backends, and one that measures.
    if weights is None and not offset and clamp is None:
        out: Tensor = _choose(GATED, ActivationSpec(x.device.type, x.dtype, kind), backend)(x, kind)
        return out
    if clamp is not None and clamp <= 0:
        raise ValueError(f"clamp={clamp} must be positive, or None for no limit.")
    return _weighted(x, kind, True, weights, offset, clamp, backend)


def gated_pair(gate: Tensor, up: Tensor, kind: str = "silu", backend: str = "auto") -> Tensor:
    """``act(gate) * up`` for two tensors ``[..., f]`` of one dtype, as layers with two projections have them.

    Raises:
        ValueError: ``kind`` is unknown, or the tensors differ in shape or dtype.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {list(gate.shape)} {gate.dtype} and up {list(up.shape)} {up.dtype}; "
            "shape and dtype must be equal. Cast one of them first."
        )
    out: Tensor = _choose(GATED_PAIR, ActivationSpec(gate.device.type, gate.dtype, kind), backend)(gate, up, kind)
    return out


def activation(x: Tensor, kind: str, backend: str = "auto", *, weights: Tensor | None = None) -> Tensor:
    """``act(x)``, element by element, times the ``weights [...]`` of rows if given; backends as in :func:`gated`.

    Raises:
        ValueError: ``kind`` is unknown, or ``weights`` has another shape.
    """
    if weights is None:
        out: Tensor = _choose(ACTIVATION, ActivationSpec(x.device.type, x.dtype, kind), backend)(x, kind)
        return out
    return _weighted(x, kind, False, weights, 0.0, None, backend)


def _weighted(
    x: Tensor, kind: str, gates: bool, weights: Tensor | None, offset: float, clamp: float | None, backend: str
) -> Tensor:
    if weights is not None and weights.shape != x.shape[:-1]:
        raise ValueError(
            f"weights {list(weights.shape)} of x {list(x.shape)}; one weight per row is needed: {list(x.shape[:-1])}."
        )
    run = _choose(WEIGHTED, ActivationSpec(x.device.type, x.dtype, kind), backend)
    return run(x, kind, gates, weights, offset, clamp)
