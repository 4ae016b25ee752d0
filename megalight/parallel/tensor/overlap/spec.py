"""What a way to overlap must serve, and the product it is handed."""

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
    """One split layer, as the ways are asked whether they can serve it.

    Attributes:
        tp: how many ranks share the layer.
        sequence_parallel: tokens are split between layers.
        device: type of the device.
        dtype: of the layer's input; None before one is seen.
        weight_dtype: of its weight.
        low_precision: its products are formed in 8 or 4 bits.
        autocast: they are formed in another type than the tensors have.
        recorded: steps are recorded as CUDA graphs.
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
        call: ``(rows [n, inner], out [n, width] or None) -> [n, width]``: into ``out`` where given. With None, leading
            dims may be several.
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
        return cls(lambda grad_y, out: input_gradient(grad_y, weight, out), weight.shape[0], weight.shape[1])


class Overlap(Protocol):
    """A way to run products and their collectives. ``dim`` counts tokens; all ranks call the same with equal shapes."""

    def start_gather(self, share: Tensor, dim: int) -> Pending:
        """All ranks' shares along ``dim``."""
        ...

    def gather_product(self, share: Tensor, product: Product, dim: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """The product of all ranks' shares; and the gathered shares where they are to be kept."""
        ...

    def hold(self, whole: Tensor) -> Tensor:
        """Gathered shares in memory that nobody writes over; instead of :meth:`done`."""
        ...

    def done(self, whole: Tensor) -> None:
        """Gathered shares have been read: from here on they may be written over. Every caller says so, soon."""
        ...

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """This rank's slice of the sum over ranks of their products.

        Args:
            covered: the caller computes something else before it waits.
        """
        ...

    def start_product_reduce(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """The whole sum over ranks of their products."""
        ...
