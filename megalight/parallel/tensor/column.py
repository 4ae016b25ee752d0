"""A linear layer whose output features are split over ``tp``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalight.ops.common import once_differentiable
from megalight.ops.linear import accumulate_bias_gradient, accumulate_weight_gradient, linear, product_and_save
from megalight.ops.linear.deferred import queue_for
from megalight.ops.linear.inputs import recipe_of, save_input, saved_input
from megalight.parallel.collectives import Pending, join
from megalight.parallel.tensor.codes import GatheredCodes, casts_shares
from megalight.parallel.tensor.overlap.spec import Overlap, Product
from megalight.parallel.tensor.shared import Shared, Tokens


class ColumnLinear(nn.Module):
    """``y = x W^T + b`` for this rank's rows of ``W``.

    Args:
        weight: ``[out/tp, in]``.
        bias: ``[out/tp]`` or None.
        section_sizes: this rank's output features per section.
        shared: the state that all tensor-parallel layers share.
        tokens: the tokens that the layer receives under sequence parallelism.
        gather_output: return the output features of all ranks.
        name: name of the module, for options and messages.

    Attributes:
        adapter: an :class:`~megalight.nn.adapter.AdapterSet` of :class:`~.adapter.ColumnAdapter`, or None.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        section_sizes: Sequence[int],
        shared: Shared,
        *,
        tokens: Tokens = "share",
        gather_output: bool = False,
        name: str = "",
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.section_sizes = list(section_sizes)
        self.out_features, self.in_features = weight.shape
        self.shared = shared
        self.tokens = tokens
        self.gather_output = gather_output
        self.name = name
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[T/tp, in] -> [T, out/tp]`` under sequence parallelism, else ``[T, in] -> [T, out/tp]``."""
        y = column_linear(x, self.weight, self.bias, self.shared, self.tokens, self.name)
        # The adapter adds its term before the outputs are joined: it is split over the same output features.
        y = y if self.adapter is None else self.adapter(x, y, self.weight, self.bias)
        return join(y, self.shared.group, y.dim() - 1) if self.gather_output else y

    def extra_repr(self) -> str:
        """Return the local shape and the number of ranks, for printing."""
        return f"{self.in_features} -> {self.out_features} x {self.shared.mesh.tp}, bias={self.bias is not None}"


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, shared: Shared, planned: Tokens = "share", name: str = ""
) -> Tensor:
    """Apply a column-parallel linear layer, as a function."""
    tokens = shared.tokens(planned)
    # One rank, or a `Boundary` above has gathered the tokens and sums their gradient: nothing to communicate.
    if shared.group is None or tokens == "gathered":
        return linear(x, weight, bias)
    overlap, dim, keep = shared.overlap(name, x, weight), shared.sequence_dim, shared.tensor.keep_gathered
    if tokens == "whole":
        y: Tensor = _WholeInput.apply(x, weight, bias, overlap, dim)  # type: ignore[no-untyped-call]
    elif casts_shares(x, weight):
        y = GatheredCodes.apply(x, weight, bias, overlap, shared.group, dim, keep)  # type: ignore[no-untyped-call]
    else:
        y = _GatheredInput.apply(x, weight, bias, overlap, dim, keep)  # type: ignore[no-untyped-call]
    return y


class _WholeInput(torch.autograd.Function):
    """Every rank holds ``x``. Backward: the all-reduce of its gradient runs during the weight-gradient GEMM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap, dim: int) -> Tensor:
        # Parameters are kept by reference: a saved-tensor hook would return tensors without their attributes.
        ctx.weight, ctx.bias, ctx.overlap, ctx.dim = weight, bias, overlap, dim
        return product_and_save(ctx, x, weight, bias, ctx.needs_input_grad[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        pending, grad_weight = None, None
        # A deferred weight gradient covers nothing: it is computed in another action of the schedule.
        covered = ctx.needs_input_grad[1] and queue_for(ctx.weight) is None
        if ctx.needs_input_grad[0]:
            # Started first, waited for last: the all-reduce of the input gradient `[T, in]` runs beside the weight
            # gradient. Each rank has the term of its own output features only, so a sum is due.
            pending = ctx.overlap.start_product_reduce(grad_y, Product.of_input(ctx.weight), ctx.dim, covered=covered)
        if ctx.needs_input_grad[1]:
            grad_weight = accumulate_weight_gradient(grad_y, saved_input(ctx), ctx.weight)
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if ctx.needs_input_grad[2] else None
        return (pending.wait() if pending else None), grad_weight, grad_bias, None, None


class _GatheredInput(torch.autograd.Function):
    """Each rank holds a share of the tokens of ``x``, and saves only that, unless all tokens are to be kept.

    Backward: ``x`` is gathered again during the input-gradient GEMM. The reduce-scatter of the input gradient runs
    during the weight-gradient GEMM or, if that is delayed, during pieces of the input-gradient GEMM itself.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap, dim: int, keep: bool
    ) -> Tensor:
        ctx.weight, ctx.bias, ctx.overlap, ctx.dim = weight, bias, overlap, dim
        # With a recipe there is nothing to keep: the backward computes the input again.
        ctx.kept = keep and ctx.needs_input_grad[1] and recipe_of(x) is None
        y, whole = overlap.gather_product(x, Product.forward(weight, bias), dim, keep=ctx.kept)
        if whole is not None:
            # The gathered tokens may lie in a slot that the next layer's gather overwrites; the backward comes much
            # later.
            whole = overlap.hold(whole)
        save_input(ctx, x if whole is None else whole, ctx.needs_input_grad[1])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        overlap, dim, grad_weight, share = ctx.overlap, ctx.dim, None, None
        if ctx.needs_input_grad[1]:
            saved = saved_input(ctx)
            assert isinstance(saved, Tensor)
            # The queue may outlive this backward: a saved tensor with its graph would keep the whole layer alive.
            share = saved.detach()
        later = queue_for(ctx.weight)
        again = share is not None and not ctx.kept
        # The gather starts before the input-gradient GEMM, so that it runs during that GEMM.
        gathering = overlap.start_gather(share, dim) if again and later is None else None
        scattering = None
        if ctx.needs_input_grad[0]:
            covered = share is not None and later is None
            scattering = overlap.start_product_scatter(grad_y, Product.of_input(ctx.weight), dim, covered=covered)
        if share is not None and later is not None and again:
            # Only the share waits in the queue; it is gathered when the weight gradient is computed.
            later.put(ctx.weight, grad_y, lambda: _lasting(overlap, share, dim))
        elif share is not None:
            x = Pending(None, lambda: share) if gathering is None else gathering
            compute = partial(_weight_gradient, grad_y, x, ctx.weight, overlap)
            grad_weight = overlap.put_off(ctx.weight, grad_y.numel() // grad_y.shape[-1], compute)
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if ctx.needs_input_grad[2] else None
        return (scattering.wait() if scattering else None), grad_weight, grad_bias, None, None, None


def _weight_gradient(grad_y: Tensor, arriving: Pending, weight: Tensor, overlap: Overlap) -> Tensor | None:
    x = arriving.wait()
    gradient = accumulate_weight_gradient(grad_y, x, weight)
    # As early as possible: peers wait for the slot before they send the next layer's tokens.
    overlap.done(x)
    return gradient


def _lasting(overlap: Overlap, share: Tensor, dim: int) -> Callable[[], Tensor]:
    """Start the gather; the returned function waits, and returns the tokens in memory that is not reused."""
    gathering = overlap.start_gather(share, dim)
    return lambda: overlap.hold(gathering.wait())
