"""Products of the groups of rows of a matrix, each with a matrix of its own, by the products of single matrices.

The library has one call per product. What all groups share is looked up once, and views of all groups are made by one
call, so that the host has little more to do than these calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalight.ops.quantize import Quantized, Scheme
from megalight.ops.scaled_mm import Spec, choose, writes_products


@dataclass(slots=True, eq=False)
class Factors:
    """The right factors ``[N, K]`` of all groups, apart.

    Attributes:
        codes: ``[N, K]`` of each group.
        transposed: views ``[K, N]`` of them.
        scales: of each group: 0-dim with one scale per matrix, else ``[N, 1]``.
        scheme: that of each matrix.
    """

    codes: tuple[Tensor, ...]
    transposed: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    scheme: Scheme

    @staticmethod
    def of(stack: Quantized, count: int, scheme: Scheme) -> Factors:
        """Take ``count`` matrices apart that stand one below the other, with a scale for each row.

        Args:
            stack: ``[count * N, K]`` with scales ``[count * N, 1]``, equal in a matrix that has one scale.
            scheme: that of a single matrix.
        """
        height = stack.data.shape[0] // count
        codes, scales = stack.data.view(count, height, -1), stack.scale.view(count, height, 1)
        if scheme.tile == (0, 0):
            scales = scales[:, 0, 0]
        return Factors(codes.unbind(), codes.mT.unbind(), scales.unbind(), scheme)


def multiply_groups(
    out: Tensor,
    rows: Quantized,
    scales: Sequence[Tensor] | None,
    factors: Factors,
    sizes: Sequence[int],
    *,
    fast: bool = False,
    backend: str = "auto",
) -> None:
    """Write the product of each group's rows and its factor, transposed, into its rows of ``out``.

    Rows of ``out`` after the last group are left as they are.

    Args:
        out: ``[R, N]``.
        rows: ``[R, K]`` with the scheme of a single matrix; its scales ``[R, 1]`` serve groups with a scale per row.
        scales: the scale of each group, 0-dim, if it has one. They begin at multiples of 16 bytes, as do the factors'.
        factors: those of the groups.
        sizes: number of rows of each group.
        fast: whether sums may have fewer bits than float32.
        backend: name of a backend of :mod:`megalight.ops.scaled_mm`.
    """
    product = choose(Spec(out.device.type, rows.scheme, factors.scheme, out.dtype), backend)
    parts = _split(rows.data, sizes)
    targets = _split(out, sizes)
    # A copy: groups begin anywhere, and products need scales at multiples of 16 bytes.
    lines = [part.clone() for part in _split(rows.scale, sizes)[: len(sizes)]] if scales is None else scales
    if writes_products(product):
        for size, target, codes, scale, factor, own in zip(
            sizes, targets, parts, lines, factors.transposed, factors.scales, strict=False
        ):
            if size:
                torch._scaled_mm(
                    codes, factor, scale_a=scale, scale_b=own, out_dtype=out.dtype, use_fast_accum=fast, out=target
                )
        return
    for size, target, codes, scale, factor, own in zip(
        sizes, targets, parts, lines, factors.codes, factors.scales, strict=False
    ):
        if size:
            left, right = (
                Quantized(codes, scale.view(-1, 1), rows.scheme),
                Quantized(factor, own.view(-1, 1), factors.scheme),
            )
            target.copy_(product(left, right, out.dtype, fast, None))


def _split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return views of all groups, and of the rows after them, in one call."""
    return torch.split_with_sizes(x, [*sizes, x.shape[0] - sum(sizes)])
