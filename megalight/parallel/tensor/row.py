"""A linear layer whose input features are split over ``tp``."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.ops.linear import linear
from megalight.parallel.collectives import all_reduce, reduce_scatter
from megalight.parallel.tensor.shared import Shared


class RowLinear(nn.Module):
    """``y = x W^T + b`` for this rank's columns of ``W``: partial results are summed, then the bias is added once.

    The backward needs nothing beyond the regions': under sequence parallelism the gradient of ``y`` has to be gathered
    before either GEMM can start; without it, it is there already.

    Args:
        weight: ``[out, in/tp]``.
        bias: ``[out]`` or None; under sequence parallelism its gradient here comes from this rank's tokens alone.
        shared: what the layers share.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, shared: Shared) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """``[T, in/tp] -> [T/tp, out]`` under sequence parallelism, else ``[T, in/tp] -> [T, out]``."""
        y = linear(x, self.weight)
        if self.shared.sequence_parallel:
            y = reduce_scatter(y, self.shared.group, self.shared.sequence_dim)
        else:
            y = all_reduce(y, self.shared.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Shape here and how many ranks share the layer, for printing."""
        return f"{self.in_features} x {self.shared.mesh.tp} -> {self.out_features}, bias={self.bias is not None}"
