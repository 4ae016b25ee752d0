"""Activations with torch's own functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def activation(x: Tensor, kind: str) -> Tensor:
    """``act(x)``."""
    return KINDS[kind](x)


def gated(x: Tensor, kind: str) -> Tensor:
    """``act(gate) * up`` with ``x = gate | up`` along the last dim."""
    gate, up = x.chunk(2, -1)
    return KINDS[kind](gate) * up


def gated_pair(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``act(gate) * up``."""
    return KINDS[kind](gate) * up
