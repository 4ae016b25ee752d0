"""A linear layer whose input features are split over ``tp``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.ops.common import once_differentiable
from megalight.ops.linear import accumulate_weight_gradient, input_gradient, linear, product_and_save
from megalight.ops.linear.deferred import queue_for
from megalight.ops.linear.inputs import save_input, saved_input
from megalight.ops.parameter import precision_of
from megalight.ops.quantize import Quantized
from megalight.parallel.collectives import all_reduce, reduce_scatter
from megalight.parallel.tensor.codes import gather_gradient
from megalight.parallel.tensor.overlap.spec import Overlap, Product
from megalight.parallel.tensor.shared import Shared


class RowLinear(nn.Module):
    """``y = x W^T + b`` for this rank's columns of ``W``: partial results are summed, then the bias is added once.

    Args:
        weight: ``[out, in/tp]``.
        bias: ``[out]`` or None. Under sequence parallelism, its local gradient comes from this rank's tokens only.
        shared: the state that all tensor-parallel layers share.
        name: name of the module, for options and messages.

    Attributes:
        adapter: an :class:`~megalight.nn.adapter.AdapterSet` with this rank's ``A [r, in/tp]``, or None.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, shared: Shared, name: str = "") -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.shared = shared
        self.name = name
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[T, in/tp] -> [T/tp, out]`` under sequence parallelism, else ``[T, in/tp] -> [T, out]``."""
        shared = self.shared
        if shared.group is None:
            return linear(x, self.weight, self.bias)
        y = self._sum(x) if self.adapter is None else self._adapted_sum(x, self.adapter)
        # After the sum over ranks: a bias inside the product would be added tp times.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        shared = self.shared
        function = _ScatteredSum if shared.sequence_parallel else _WholeSum
        overlap, dim = shared.overlap(self.name, x, self.weight), shared.sequence_dim
        y: Tensor = function.apply(x, self.weight, overlap, shared.group, dim)  # type: ignore[no-untyped-call]
        return y

    def _adapted_sum(self, x: Tensor, adapter: nn.Module) -> Tensor:
        """Sum layer and adapter with one collective: this rank adds one term to ``x W^T`` and one to ``x A^T B^T``."""
        shared = self.shared
        y = adapter(x, linear(x, self.weight), self.weight)
        if shared.sequence_parallel:
            return reduce_scatter(y, shared.group, shared.sequence_dim)
        return all_reduce(y, shared.group)

    def extra_repr(self) -> str:
        """Return the local shape and the number of ranks, for printing."""
        return f"{self.in_features} x {self.shared.mesh.tp} -> {self.out_features}, bias={self.bias is not None}"


class _ScatteredSum(torch.autograd.Function):
    """Reduce-scatters partial sums by tokens. Backward: the gradient is gathered once, for both GEMMs.

    If the overlap backend cuts products into pieces, each collective runs during its own product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, overlap: Overlap, group: ProcessGroup, dim: int) -> Tensor:
        ctx.weight, ctx.overlap, ctx.group, ctx.dim, ctx.x_dtype = weight, overlap, group, dim, x.dtype
        return overlap.start_product_scatter(x, _product(ctx, x, weight), dim, covered=False).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_weight, *_ = ctx.needs_input_grad
        grad_x, grad_weight = None, None
        saved = saved_input(ctx) if need_weight else None  # first: it may run a forward again, which also gathers
        # The gathered gradient, which both GEMMs use.
        whole = gather_gradient(grad_y, ctx.weight, ctx.group, ctx.dim)
        if need_x:
            if whole is not None:
                grad_x = input_gradient(whole, ctx.weight)
            else:
                product = Product.of_input(ctx.weight)
                grad_x, whole = ctx.overlap.gather_product(grad_y, product, ctx.dim, keep=need_weight)
            # Under autocast, the product has the dtype of `grad_y`.
            grad_x = grad_x.to(ctx.x_dtype)
        if saved is not None:
            # The input needs no gradient (first layer, frozen embedding), so nothing has gathered yet.
            whole = ctx.overlap.start_gather(grad_y, ctx.dim).wait() if whole is None else whole
            # The queue reads the gradient later, when the slot may hold another layer's.
            if queue_for(ctx.weight) is not None:
                whole = ctx.overlap.hold(whole)
            grad_weight = ctx.overlap.put_off(
                ctx.weight,
                whole.numel() // whole.shape[-1],
                partial(_weight_gradient, whole, saved, ctx.weight, ctx.overlap),
            )
        return grad_x, grad_weight, None, None, None


def _weight_gradient(whole: Tensor, x: Tensor | Quantized, weight: Tensor, overlap: Overlap) -> Tensor | None:
    gradient = accumulate_weight_gradient(whole, x, weight)
    overlap.done(whole)
    return gradient


class _WholeSum(torch.autograd.Function):
    """All-reduces partial sums; every rank gets all tokens, and the incoming gradient is whole already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, overlap: Overlap, group: ProcessGroup, dim: int) -> Tensor:
        ctx.weight, ctx.x_dtype = weight, x.dtype
        return overlap.start_product_reduce(x, _product(ctx, x, weight), dim, covered=False).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_weight, *_ = ctx.needs_input_grad
        grad_x = input_gradient(grad_y, ctx.weight).to(ctx.x_dtype) if need_x else None
        grad_weight = accumulate_weight_gradient(grad_y, saved_input(ctx), ctx.weight) if need_weight else None
        return grad_x, grad_weight, None, None, None


def _product(ctx: Any, x: Tensor, weight: Tensor) -> Product:
    """Return the forward product of a function of ``(x, weight, ...)``, and save ``x`` for the backward."""
    if precision_of(weight) is None:
        save_input(ctx, x, ctx.needs_input_grad[1])
        return Product.forward(weight, None)
    # Not callable in pieces: in low precision it saves the cast of the whole input.
    needed = ctx.needs_input_grad[1]
    return Product(
        lambda whole, out: product_and_save(ctx, whole, weight, None, needed), weight.shape[1], weight.shape[0]
    )
