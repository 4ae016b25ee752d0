"""A linear layer whose output features are split over ``tp``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megalight.ops.linear import (
    accumulate_bias_gradient,
    accumulate_weight_gradient,
    input_gradient,
    linear,
    precision_of,
    product,
    product_and_save,
)
from megalight.ops.linear.deferred import Begin, queue_for
from megalight.ops.linear.inputs import recipe_of, save_cast, save_input, saved_input
from megalight.ops.quantize import Quantized
from megalight.parallel.collectives import join, start_all_gather, start_all_reduce, start_reduce_scatter
from megalight.parallel.plan import Tokens
from megalight.parallel.tensor.codes import SharedCodes
from megalight.parallel.tensor.shared import Shared


class ColumnLinear(nn.Module):
    """``y = x W^T + b`` for this rank's rows of ``W``.

    Args:
        weight: ``[out/tp, in]``.
        bias: ``[out/tp]`` or None.
        section_sizes: this rank's output features per section.
        shared: what the layers share.
        tokens: which tokens it is fed under sequence parallelism.
        gather_output: hand out all features.
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
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.section_sizes = list(section_sizes)
        self.out_features, self.in_features = weight.shape
        self.shared = shared
        self.tokens = tokens
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """``[T/tp, in] -> [T, out/tp]`` under sequence parallelism, else ``[T, in] -> [T, out/tp]``."""
        y = column_linear(x, self.weight, self.bias, self.shared, self.tokens)
        return join(y, self.shared.group, y.dim() - 1) if self.gather_output else y

    def extra_repr(self) -> str:
        """Shape here and how many ranks share the layer, for printing."""
        return f"{self.in_features} -> {self.out_features} x {self.shared.mesh.tp}, bias={self.bias is not None}"


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, shared: Shared, planned: Tokens = "share") -> Tensor:
    """The layer as a function."""
    tokens = shared.tokens(planned)
    if shared.group is None or tokens == "gathered":
        return linear(x, weight, bias)
    apply: Any = _GatheredInput.apply if tokens == "share" else _WholeInput.apply
    y: Tensor = apply(x, weight, bias, shared.group, shared.sequence_dim)
    return y


class _WholeInput(torch.autograd.Function):
    """Every rank holds ``x``. Backward: the all-reduce of its gradient runs under the weight-gradient GEMM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, dim: int) -> Tensor:
        # Parameters are kept by reference: what saved-tensor hooks hand back would lack their attributes.
        ctx.weight, ctx.bias, ctx.group = weight, bias, group
        return product_and_save(ctx, x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        pending = None
        if ctx.needs_input_grad[0]:
            pending = start_all_reduce(input_gradient(grad_y, ctx.weight), ctx.group)
        grad_weight = (
            accumulate_weight_gradient(grad_y, saved_input(ctx), ctx.weight) if ctx.needs_input_grad[1] else None
        )
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if ctx.needs_input_grad[2] else None
        return (pending.wait() if pending else None), grad_weight, grad_bias, None, None


class _GatheredInput(torch.autograd.Function):
    """Each rank holds a share of the tokens of ``x``, and saves no more than that.

    Backward: ``x`` is gathered again under the input-gradient GEMM, and the reduce-scatter of the input gradient runs
    under the weight-gradient GEMM. Where parts can be cast as the whole would be, codes are gathered, and saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, dim: int) -> Tensor:
        ctx.weight, ctx.bias, ctx.group, ctx.dim = weight, bias, group, dim
        precision, needed = precision_of(weight), ctx.needs_input_grad[1]
        if precision is None or not precision.casts_shares or recipe_of(x) is not None:
            save_input(ctx, x, needed)
            return product(start_all_gather(x, group, dim).wait(), weight, bias)
        share = SharedCodes.of(x, precision, group, dim)
        if needed:
            save_cast(ctx, share.rows)
        ctx.shape = x.shape
        y = precision.multiply(share.start()(), weight, bias, x.dtype)
        return y.view(*(n * group.size() if d == dim else n for d, n in enumerate(x.shape[:-1])), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        group, dim, grad_weight, begin = ctx.group, ctx.dim, None, None
        if ctx.needs_input_grad[1]:
            begin = _gathering(saved_input(ctx), ctx)
        later = queue_for(ctx.weight)
        finish = begin() if begin is not None and later is None else None
        scattering = None
        if ctx.needs_input_grad[0]:
            scattering = start_reduce_scatter(input_gradient(grad_y, ctx.weight), group, dim)
        if finish is not None:
            grad_weight = accumulate_weight_gradient(grad_y, finish(), ctx.weight)
        elif begin is not None and later is not None:  # only the share waits; it is gathered when its turn comes
            later.put(ctx.weight, grad_y, begin)
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if ctx.needs_input_grad[2] else None
        return (scattering.wait() if scattering else None), grad_weight, grad_bias, None, None


def _gathering(kept: Tensor | Quantized, ctx: Any) -> Begin:
    """How the input comes back, from what was saved of this rank's share."""
    group, dim = ctx.group, ctx.dim
    if isinstance(kept, Tensor):
        share = kept.detach()
        return lambda: start_all_gather(share, group, dim).wait
    precision = precision_of(ctx.weight)
    assert precision is not None
    codes = SharedCodes(kept, ctx.shape, group, dim)

    def begin() -> Callable[[], Quantized]:
        whole = codes.start()
        return lambda: precision.for_weight_gradient(whole())

    return begin
