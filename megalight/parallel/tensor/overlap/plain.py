"""One collective, then one product; or the reverse."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from megalight.parallel.tensor.overlap.spec import OverlapSpec, Product


def why_not(spec: OverlapSpec) -> str | None:
    """Serves every layer."""
    return None


class Plain:
    """Collectives hide only under what callers compute before they wait.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def start_gather(self, share: Tensor, dim: int) -> Pending:
        """See :class:`~megalight.parallel.tensor.overlap.spec.Overlap`, here and below."""
        return start_all_gather(share, self.group, dim)

    def gather_product(self, share: Tensor, product: Product, dim: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Nothing overlaps."""
        whole = start_all_gather(share, self.group, dim).wait()
        return product.call(whole, None), whole if keep else None

    def hold(self, whole: Tensor) -> Tensor:
        """Nothing is ever written over."""
        return whole

    def done(self, whole: Tensor) -> None:
        """Nothing to do."""

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """The reduce-scatter runs until the caller waits."""
        return start_reduce_scatter(product.call(x, None), self.group, dim)

    def start_product_reduce(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """The all-reduce runs until the caller waits."""
        return start_all_reduce(product.call(x, None), self.group)
