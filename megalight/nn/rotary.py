"""Rotary position embedding (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalight.ops.batch_invariant import MODE, rowwise
from megalight.ops.latent_heads import rotate_tail
from megalight.ops.rotary import RotaryAxes, RotaryScaling, apply_rotary, rotary_table, rotate_qkv
from megalight.ops.rotary.quantized import rotate_qkv_elided


class RotaryTable(NamedTuple):
    """Cosines and sines of the angles of ``T`` tokens, computed once and used by every layer.

    Attributes:
        cos: ``[T, dim / 2]``.
        sin: ``[T, dim / 2]``.
        interleaved: pairs are the features (0, 1), (2, 3), ... instead of (0, dim / 2), (1, dim / 2 + 1), ...
        backend: backend of the op that rotates.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    backend: str

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the first ``dim`` features of every head of ``x [T, H, D]``."""
        return apply_rotary(x, self.cos, self.sin, interleaved=self.interleaved, backend=self.backend)

    def rotate_tail(self, x: Tensor) -> Tensor:
        """Rotate the last ``dim`` features of every head of ``x [T, H, D]``."""
        return rotate_tail(x, self.cos, self.sin, interleaved=self.interleaved, backend=self.backend)

    def rotate_qkv(
        self, qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, elided: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``[T, (H + 2 Hkv) D]`` into ``q [T, H, D], k, v [T, Hkv, D]`` and rotate ``q`` and ``k``.

        ``elided``: the gradient of ``qkv`` is not written; see :mod:`megalight.ops.autograd`.
        """
        rotate, cos, sin = rotate_qkv_elided if elided else rotate_qkv, self.cos, self.sin
        return rotate(qkv, num_heads, num_kv_heads, head_dim, cos, sin, self.interleaved, backend=self.backend)


class Rotary(nn.Module):
    """Computes the angles ``position * base^(-2 i / dim)``. It has no parameters.

    Args:
        dim: how many features of a head are rotated; an even number.
        base: the slowest pair has a wavelength of about ``2 pi base`` tokens.
        scaling: how frequencies are scaled for contexts longer than in the first training.
        axes: which pair turns with the position on which axis. None: positions have one axis.
        interleaved: see :class:`RotaryTable`.
        backend: backend of the op that rotates.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        *,
        scaling: RotaryScaling | None = None,
        axes: RotaryAxes | None = None,
        interleaved: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = base
        self.scaling = scaling
        self.axes = axes
        self.interleaved = interleaved
        self.backend = backend

    def forward(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        """Return the table for ``positions [T]``, precise enough for activations of ``dtype``.

        With ``axes``, positions may be ``[A, T]``. One row stands for the same position on each axis.
        """
        # float32 angles are enough for float32 and half activations, but not for float64
        precise = positions.double() if dtype == torch.float64 else positions
        # One table for all layers: cosines of thousands of positions are not computed twice.
        if MODE.on:
            # One column for each token.
            columns = precise if precise.dim() == 1 else precise.T
            cos, sin = rowwise(
                lambda rows: rotary_table(
                    rows if rows.dim() == 1 else rows.T, self.dim, self.base, self.scaling, self.axes
                ),
                columns,
            )
        else:
            cos, sin = rotary_table(precise, self.dim, self.base, self.scaling, self.axes)
        return RotaryTable(cos, sin, self.interleaved, self.backend)

    def extra_repr(self) -> str:
        """Return features and base, for printing."""
        return f"{self.dim}, base={self.base:g}, scaling={self.scaling}, interleaved={self.interleaved}"
