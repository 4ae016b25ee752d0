"""FP8 tensor-parallel communication: inputs and output gradients of split layers are sent quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.common import once_differentiable
from megalight.ops.linear import accumulate_bias_gradient, accumulate_weight_gradient
from megalight.ops.linear.low_precision import LowPrecision, precision_of
from megalight.ops.linear.weight_gradient import queue_for
from megalight.ops.note import recipe_of, save_cast, saved_input
from megalight.ops.quantize import Quantized
from megalight.ops.quantize.amax_history import GRADIENT, INPUT
from megalight.parallel.collectives import start_all_gather
from megalight.parallel.tensor.overlap.spec import Overlap, Product


def casts_shards(x: Tensor, weight: Tensor) -> bool:
    """Whether each rank can cast its share of ``x`` exactly as the whole ``x`` would be cast for ``weight``."""
    precision = precision_of(weight)
    # With a recipe, the input is not kept but computed again: there is no share of quantized values to save.
    return precision is not None and precision.casts_shards and recipe_of(x) is None


@dataclass(frozen=True)
class ShardedQuantized:
    """This rank's share of the tokens of a matrix, cast with the scale of all tokens.

    Attributes:
        rows: quantized values ``[T/tp, f]``.
        shape: shape of the share before the cast.
        group: the ranks that hold the other shares.
        dim: the dim of ``shape`` that counts tokens.
    """

    rows: Quantized
    shape: torch.Size
    group: ProcessGroup
    dim: int

    @classmethod
    def of(cls, x: Tensor, role: int, precision: LowPrecision, group: ProcessGroup, dim: int) -> ShardedQuantized:
        """Cast ``x [..., f]``, an input or an output gradient; ranks first agree on the scale."""

        def largest(amax: Tensor) -> None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)

        # The scale must cover the tokens of all ranks: gathered quantized values with different scales would be no
        # matrix.
        return cls(precision.cast_share(x, role, largest), x.shape, group, dim)

    def start(self) -> Callable[[], Quantized]:
        """Start the gather; the returned function waits, and returns the whole matrix ``[T, f]``, quantized."""
        data = self.rows.data
        # As bytes: NCCL and gloo do not know all 8-bit float types, and a gather need not.
        shares = data.view(torch.uint8).view(*self.shape[:-1], -1)
        gathering = start_all_gather(shares, self.group, self.dim)

        def finish() -> Quantized:
            whole = gathering.wait().reshape(-1, data.shape[1])
            return replace(self.rows, data=whole.view(data.dtype))

        return finish


def gather_gradient(grad_y: Tensor, weight: Tensor, group: ProcessGroup, dim: int) -> Tensor | None:
    """Gather an output gradient ``[..., out]`` over the tokens quantized, which both products of a backward pass read.

    Returns:
        the gradient of all tokens, without values; None: the weight multiplies otherwise, or its recipe has scales for
        parts of a matrix.
    """
    precision = precision_of(weight)
    if precision is None or not precision.casts_shards:
        return None
    rows = ShardedQuantized.of(grad_y, GRADIENT, precision, group, dim).start()()
    shape = (n * group.size() if d == dim else n for d, n in enumerate(grad_y.shape))
    return precision.whole_gradient(rows, tuple(shape), grad_y)


class GatheredQuantized(torch.autograd.Function):
    """``y = x W^T + b`` for an input ``[T/tp, in]``. Quantized, it is gathered; this rank's part or all is saved.

    Backward: it is gathered again during the input-gradient GEMM. The reduce-scatter of the input gradient runs
    during the weight-gradient GEMM.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: Overlap,
        group: ProcessGroup,
        dim: int,
        keep: bool,
    ) -> Tensor:
        """Cast, gather, multiply."""
        # Parameters are kept by reference: a saved-tensor hook would return tensors without their attributes.
        ctx.weight, ctx.bias, ctx.overlap, ctx.group, ctx.dim = weight, bias, overlap, group, dim
        ctx.shape, ctx.kept = x.shape, keep
        precision = precision_of(weight)
        assert precision is not None
        # Cast first: quantized values are a half or a quarter of the bytes.
        share = ShardedQuantized.of(x, INPUT, precision, group, dim)
        whole = share.start()()
        if ctx.needs_input_grad[1]:
            save_cast(ctx, whole if keep else share.rows)
        y = precision.multiply(whole, weight, bias, x.dtype)
        return y.view(*(n * group.size() if d == dim else n for d, n in enumerate(x.shape[:-1])), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        # The order of this method matters: start the gather, compute the input gradient while it runs, start the
        # reduce-scatter, compute the weight gradient while that runs, and only then wait.
        later = queue_for(ctx.weight)
        begin = _again(ctx) if need_weight else None
        # All ranks must start collectives in the same order. Here that is: this gather, then the reduce-scatter below.
        finish = begin() if begin is not None and later is None else None
        scattering, grad_weight = None, None
        if need_x:
            product, covered = Product.of_input(ctx.weight), finish is not None
            scattering = ctx.overlap.start_product_scatter(grad_y, product, ctx.dim, covered=covered)
        if finish is not None:
            grad_weight = accumulate_weight_gradient(grad_y, finish(), ctx.weight)
        elif begin is not None and later is not None:  # only what is saved waits in the queue; the gather runs later
            later.put(ctx.weight, grad_y, begin)
        # Before the wait, so that this sum is covered too.
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if need_bias else None
        return (scattering.wait() if scattering else None), grad_weight, grad_bias, None, None, None, None


def _again(ctx: Any) -> Callable[[], Callable[[], Quantized]]:
    """Return a function that starts to restore the whole input from what was saved, in the weight gradient's form."""
    kept, precision = saved_input(ctx), precision_of(ctx.weight)
    assert isinstance(kept, Quantized) and precision is not None

    def begin() -> Callable[[], Quantized]:
        if ctx.kept:
            return lambda: precision.for_weight_gradient(kept)
        whole = ShardedQuantized(kept, ctx.shape, ctx.group, ctx.dim).start()
        return lambda: precision.for_weight_gradient(whole())

    return begin
