"""The overlap backend without pieces: one whole collective and one whole product."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from megalight.parallel.tensor.overlap.spec import OverlapSpec, Product


def why_not(spec: OverlapSpec) -> str | None:
    """Return None: this backend serves every layer."""
    return None


class Plain:
    """Overlaps collectives only with the work that callers do before they wait.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def start_gather(self, share: Tensor, dim: int) -> Pending:
        """See :class:`~megalight.parallel.tensor.overlap.spec.Overlap`, for this method and those below."""
        return start_all_gather(share, self.group, dim)

    def gather_product(self, share: Tensor, product: Product, dim: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Gather, then multiply, without overlap."""
        whole = start_all_gather(share, self.group, dim).wait()
        return product.call(whole, None), whole if keep else None

    def hold(self, whole: Tensor) -> Tensor:
        """Return the same tensor: its memory is never reused."""
        return whole

    def done(self, whole: Tensor) -> None:
        """Do nothing: no memory is reused."""

    def put_off(self, weight: Tensor, rows: int, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Compute it now: the next collective would take multiprocessors from it."""
        return compute()

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """Start a reduce-scatter, which runs until the caller waits."""
        return start_reduce_scatter(product.call(x, None), self.group, dim)

    def start_product_reduce(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """Start an all-reduce, which runs until the caller waits."""
        return start_all_reduce(product.call(x, None), self.group)

    def restart(self) -> None:
        """Do nothing: no call depends on those before it."""
