"""``out[e] += a_e b_e^T`` for the groups of columns of two casts: 8-bit weight gradients of experts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megalight.ops.grouped_scaled.layout import GROUP
from megalight.ops.quantize import Quantized, Scheme
from megalight.ops.scaled_accumulate import choose, cublaslt
from megalight.ops.scaled_mm import Spec


def accumulate_groups(
    out: Tensor,
    a: Quantized,
    b: Quantized,
    schemes: tuple[Scheme, Scheme],
    sizes: Sequence[int],
    *,
    write: bool = False,
    backend: str = "auto",
) -> None:
    """Add the product of each group to its matrix of ``out [E, M, N]``.

    Args:
        out: the matrices to add to.
        a: ``[M, L]`` with scales ``[E, M]``: each group of columns begins at a multiple of
            :data:`~megalight.ops.grouped_scaled.layout.GROUP`, and zeros fill it up to the next.
        b: ``[N, L]`` with scales ``[E, N]``, the same.
        schemes: those of the factors of a single product. With one scale per matrix, the scales of a group are equal.
        sizes: number of columns of each group, without the zeros.
        write: whether to overwrite ``out`` instead; a group without columns then gives zeros.
        backend: name of a backend of :mod:`megalight.ops.scaled_accumulate`.
    """
    add = choose(Spec(out.device.type, *schemes, out.dtype), backend)
    if add is cublaslt.accumulate:
        cublaslt.accumulate_groups(out, a, b, sizes, GROUP, write)
        return
    start = 0
    for group, size in enumerate(sizes):
        if size:
            # Tensor cores contract multiples of 16 tokens. The codes after the last token are zeros.
            columns = slice(start, start + -(-size // 16) * 16)
            left, right = (
                Quantized(codes.data[:, columns], _own(codes.scale[group], scheme), scheme)
                for codes, scheme in zip((a, b), schemes, strict=True)
            )
            add(out[group], left, right, write)
        elif write:
            out[group].zero_()  # the memory holds anything when a step begins
        start += -(-size // GROUP) * GROUP


def _own(scales: Tensor, scheme: Scheme) -> Tensor:
    """Return scales ``[r, 1]`` of rows, or ``[1, 1]`` if the scheme has one for the matrix: all are equal then."""
    return (scales[:1] if scheme.tile == (0, 0) else scales).unsqueeze(1)
