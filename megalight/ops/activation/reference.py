"""Activations in plain torch. Half types are computed in float32 and rounded once, at the end."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import wide


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
"""Name -> formula. ``gelu`` is exact (erf), ``gelu_tanh`` GPT-2's, ``quick_gelu`` CLIP's, ``squared_relu`` Primer's."""


def activation(x: Tensor, kind: str) -> Tensor:
    """``act(x)``."""
    return KINDS[kind](x.to(wide(x.dtype))).to(x.dtype)


def gated(x: Tensor, kind: str) -> Tensor:
    """``act(gate) * up`` with ``x = gate | up`` along the last dim."""
    gate, up = x.to(wide(x.dtype)).chunk(2, -1)
    return (KINDS[kind](gate) * up).to(x.dtype)


def gated_pair(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``act(gate) * up``."""
    dtype = wide(gate.dtype)
    return (KINDS[kind](gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def weighted(x: Tensor, kind: str, gates: bool, weights: Tensor | None, offset: float, clamp: float | None) -> Tensor:
    """``act(gate) * (up + offset) * weights`` with clamped halves, or ``act(x) * weights``."""
    wide_x = x.to(wide(x.dtype))
    if gates:
        gate, up = wide_x.chunk(2, -1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        y = KINDS[kind](gate) * (up + offset)
    else:
        y = KINDS[kind](wide_x)
    if weights is not None:
        y = y * weights.to(y.dtype).unsqueeze(-1)
    return y.to(x.dtype)


# Activations with torch's own functions.


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
