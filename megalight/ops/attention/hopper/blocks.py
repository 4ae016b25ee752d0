"""Blocks of half types with 128 features in Hopper's shared memory, and their loads by the copy engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megalight.ops.gluon import Descriptor, gl

LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
"""How blocks lie in shared memory: rows of 128 bytes, whose parts of 16 bytes change places."""


def described(x: Tensor, rows: int) -> Any:
    """Return the descriptor of blocks of ``rows`` tokens of one head, whose heads lie side by side."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    flat = x.as_strided((x.shape[0], width), (x.stride(0), 1))
    return Descriptor.from_tensor(flat, [rows, x.shape[2]], LAYOUT)
