"""The interface of overlap backends: the layer they must serve, and the product they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.linear import input_gradient, product
from megalight.parallel.collectives import Pending


@dataclass(frozen=True)
class OverlapSpec:
    """Properties of one split layer; a backend decides by them whether it can serve it.

    Attributes:
        tp: number of ranks that share the layer.
        sequence_parallel: tokens are split between layers.
        device: device type.
        dtype: dtype of the layer's input; None before the first input.
        weight_dtype: dtype of its weight.
        low_precision: its products are computed in 8 or 4 bits.
        autocast: autocast is enabled, so products have another dtype than the tensors.
        recorded: steps, or their layers, are recorded as CUDA graphs.
        group: the ranks; None: not made yet.
    """

    tp: int
    sequence_parallel: bool
    device: str
    dtype: torch.dtype | None
    weight_dtype: torch.dtype
    low_precision: bool
    autocast: bool
    recorded: bool = False
    group: ProcessGroup | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Product:
    """A product of rows with a matrix that this rank holds.

    Attributes:
        call: ``(rows [n, inner], out [n, width] or None) -> [n, width]``. The result is written into ``out`` if given.
            Without ``out``, the rows may have several leading dims.
        inner: features of a row.
        width: features of a result.
    """

    call: Callable[[Tensor, Tensor | None], Tensor]
    inner: int
    width: int

    @classmethod
    def forward(cls, weight: Tensor, bias: Tensor | None) -> Product:
        """``x -> x W^T + b``."""
        return cls(lambda x, out: product(x, weight, bias, out), weight.shape[1], weight.shape[0])

    @classmethod
    def of_input(cls, weight: Tensor) -> Product:
        """The input gradient ``grad_y -> grad_y W``."""
        # Messages have no gaps between rows, as products in 8 bits of odd sizes may have.
        rows, columns = weight.shape
        return cls(lambda grad_y, out: input_gradient(grad_y, weight, out).contiguous(), rows, columns)


class Overlap(Protocol):
    """Runs products and their collectives. ``dim`` counts tokens; all ranks make the same calls with equal shapes."""

    def start_gather(self, share: Tensor, dim: int) -> Pending:
        """Start to gather all ranks' shares along ``dim``."""
        ...

    def gather_product(self, share: Tensor, product: Product, dim: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Return the product of all ranks' shares, and with ``keep`` also the gathered shares."""
        ...

    def hold(self, whole: Tensor) -> Tensor:
        """Return gathered shares in memory that is not reused; call it instead of :meth:`done`."""
        ...

    def done(self, whole: Tensor) -> None:
        """Release gathered shares, whose memory may then be reused. Every caller must call it soon after reading."""
        ...

    def put_off(self, weight: Tensor, rows: int, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Call ``compute``, which returns the weight gradient, now or while a later message of this backward travels.

        Args:
            weight: the weight.
            rows: rows that its gradient sums over.
            compute: returns None if the gradient goes into the weight's main gradient. Only then may it come later.

        Returns:
            What ``compute`` returned; None if it is put off.
        """
        ...

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """Start to compute this rank's slice of the sum over ranks of their products.

        Args:
            covered: the caller computes something else before it waits.
        """
        ...

    def start_product_reduce(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """Start to compute the whole sum over ranks of their products."""
        ...

    def restart(self) -> None:
        """Begin as if nothing had run, on all ranks together, while nothing is gathered."""
        ...
