"""Tensor-parallel linear layers: column parallel, row parallel, their adapters, and FP8 communication.

With FP8 communication, inputs and output gradients of split layers are sent quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.nn.adapter import Adapter
from megalight.nn.moe.adapters import StackAdapter
from megalight.ops.autograd import once_differentiable, recipe_of, save_cast, save_input, saved_input
from megalight.ops.batch_invariant import refuse
from megalight.ops.linear import (
    accumulate_bias_gradient,
    accumulate_weight_gradient,
    input_gradient,
    linear,
    product,
    product_and_save,
    queue_for,
)
from megalight.ops.linear.low_precision import LowPrecision, precision_of
from megalight.ops.quantize import Quantized
from megalight.ops.quantize.amax_history import GRADIENT, INPUT
from megalight.ops.quantized_weight import readable
from megalight.parallel.collectives import (
    PendingCollective,
    all_gather,
    all_reduce,
    copy,
    join,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
)
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shared_state import SharedState, Tokens
from megalight.parallel.tensor.overlap.spec import Overlap, Product

DIVIDED = "layers that are divided over tensor-parallel ranks, whose sums are rounded as messages are divided"


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
        shared: SharedState,
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

    @property
    def is_product(self) -> bool:
        """Whether the output is ``x W^T + b`` of this rank's weight alone, without a gradient."""
        whole = self.shared.group is None or self.shared.tokens(self.tokens) != "share"
        return type(self) is ColumnLinear and whole and not self.gather_output

    def extra_repr(self) -> str:
        """Return the local shape and the number of ranks, for printing."""
        return f"{self.in_features} -> {self.out_features} x {self.shared.mesh.tp}, bias={self.bias is not None}"


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, shared: SharedState, planned: Tokens = "share", name: str = ""
) -> Tensor:
    """Apply a column-parallel linear layer, as a function."""
    if shared.group is not None:
        refuse(DIVIDED)
    tokens = shared.tokens(planned)
    # One rank, or a `Boundary` above has gathered the tokens and sums their gradient: nothing to communicate. Neither
    # is there where all ranks hold the tokens and no gradient is due.
    if shared.group is None or tokens == "gathered" or (tokens == "whole" and not torch.is_grad_enabled()):
        return linear(x, weight, bias)
    overlap, dim, keep = shared.overlap(name, x, weight), shared.sequence_dim, shared.tensor.keep_gathered
    if tokens == "whole":
        y: Tensor = _WholeInput.apply(x, weight, bias, overlap, dim)  # type: ignore[no-untyped-call]
    elif casts_shards(x, weight):
        y = GatheredQuantized.apply(x, weight, bias, overlap, shared.group, dim, keep)  # type: ignore[no-untyped-call]
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


def column_linears(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Apply several layers to one input. Column-parallel ones sum its gradient over ranks once, not once for each."""
    group = layers[0].shared.group if isinstance(layers[0], ColumnLinear) else None
    # A layer with something of its own around it is called.
    if group is None or not torch.is_grad_enabled() or not all(map(_is_plain, layers)):
        return [layer(x) for layer in layers]
    refuse(DIVIDED)
    parameters = [getattr(layer, name) for layer in layers for name in ("weight", "bias")]
    ys: tuple[Tensor, ...] = _WholeInputs.apply(x, group, *parameters)  # type: ignore[no-untyped-call]
    return list(ys)


def _is_plain(layer: nn.Module) -> bool:
    return (
        type(layer) is ColumnLinear
        and layer.shared.tokens(layer.tokens) == "whole"
        and layer.adapter is None
        and not layer.gather_output
        and precision_of(layer.weight) is None
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
    )


class _WholeInputs(torch.autograd.Function):
    """:class:`_WholeInput` of several layers: one all-reduce, of the sum of their input gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        ctx.pairs, ctx.group = list(zip(parameters[::2], parameters[1::2], strict=True)), group
        save_input(ctx, x, any(ctx.needs_input_grad[2:]))
        return tuple(product(x, weight, bias) for weight, bias in ctx.pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pending, found = None, list[Tensor | None]()
        if ctx.needs_input_grad[0]:
            total = input_gradient(grads[0], ctx.pairs[0][0])
            rows = total.view(-1, total.shape[-1])
            for grad, (weight, _) in zip(grads[1:], ctx.pairs[1:], strict=True):
                rows.addmm_(grad.reshape(-1, grad.shape[-1]), readable(weight).to(grad.dtype))
            pending = start_all_reduce(total, ctx.group)
        x: Any = saved_input(ctx) if any(ctx.needs_input_grad[2:]) else None
        for grad, (weight, bias), (needed, biased) in zip(
            grads, ctx.pairs, zip(ctx.needs_input_grad[2::2], ctx.needs_input_grad[3::2], strict=True), strict=True
        ):
            found.append(accumulate_weight_gradient(grad, x, weight) if needed else None)
            found.append(accumulate_bias_gradient(grad, bias) if biased else None)
        return (pending.wait() if pending else None), None, *found


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
            x = PendingCollective(None, lambda: share) if gathering is None else gathering
            compute = partial(_column_weight_gradient, grad_y, x, ctx.weight, overlap)
            grad_weight = overlap.put_off(ctx.weight, grad_y.numel() // grad_y.shape[-1], compute)
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if ctx.needs_input_grad[2] else None
        return (scattering.wait() if scattering else None), grad_weight, grad_bias, None, None, None


def _column_weight_gradient(
    grad_y: Tensor, arriving: PendingCollective, weight: Tensor, overlap: Overlap
) -> Tensor | None:
    x = arriving.wait()
    gradient = accumulate_weight_gradient(grad_y, x, weight)
    # As early as possible: peers wait for the slot before they send the next layer's tokens.
    overlap.done(x)
    return gradient


def _lasting(overlap: Overlap, share: Tensor, dim: int) -> Callable[[], Tensor]:
    """Start the gather; the returned function waits, and returns the tokens in memory that is not reused."""
    gathering = overlap.start_gather(share, dim)
    return lambda: overlap.hold(gathering.wait())


class RowLinear(nn.Module):
    """``y = x W^T + b`` for this rank's columns of ``W``: partial results are summed, then the bias is added once.

    Args:
        weight: ``[out, in/tp]``.
        bias: ``[out]`` or None. Under sequence parallelism, its local gradient comes from this rank's tokens only.
        shared: the state that all tensor-parallel layers share.
        name: name of the module, for options and messages.
        scatter_output: under sequence parallelism, return this rank's share of the tokens.

    Attributes:
        adapter: an :class:`~megalight.nn.adapter.AdapterSet` with this rank's ``A [r, in/tp]``, or None.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        shared: SharedState,
        name: str = "",
        *,
        scatter_output: bool = True,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.shared = shared
        self.name = name
        self.scatter_output = scatter_output
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[T, in/tp] -> [T/tp, out]`` under sequence parallelism with ``scatter_output``, else ``-> [T, out]``."""
        shared = self.shared
        if shared.group is None:
            return linear(x, self.weight, self.bias)
        few = None if self._scatters else shared.one_shot_for(self, x, self.out_features)
        if few is not None and self.adapter is None:
            y = few.all_reduce(linear(x, self.weight))
        elif self.adapter is None:
            y = row_sum(x, self.weight, shared, self.scatter_output, self.name)
        else:
            y = self._adapted_sum(x, self.adapter)
        # After the sum over ranks: a bias inside the product would be added tp times.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _adapted_sum(self, x: Tensor, adapter: nn.Module) -> Tensor:
        """Sum layer and adapter with one collective: this rank adds one term to ``x W^T`` and one to ``x A^T B^T``."""
        shared = self.shared
        y = adapter(x, linear(x, self.weight), self.weight)
        if self._scatters:
            return reduce_scatter(y, shared.group, shared.sequence_dim)
        return all_reduce(y, shared.group)

    @property
    def _scatters(self) -> bool:
        return self.shared.sequence_parallel and self.scatter_output

    def extra_repr(self) -> str:
        """Return the local shape and the number of ranks, for printing."""
        return f"{self.in_features} x {self.shared.mesh.tp} -> {self.out_features}, bias={self.bias is not None}"


def row_sum(x: Tensor, weight: Tensor, shared: SharedState, scatter_output: bool, name: str = "") -> Tensor:
    """Apply a row-parallel linear layer without its bias, as a function."""
    refuse(DIVIDED)
    function = _ScatteredSum if shared.sequence_parallel and scatter_output else _WholeSum
    overlap, dim = shared.overlap(name, x, weight), shared.sequence_dim
    y: Tensor = function.apply(x, weight, overlap, shared.group, dim)  # type: ignore[no-untyped-call]
    return y


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
                partial(_row_weight_gradient, whole, saved, ctx.weight, ctx.overlap),
            )
        return grad_x, grad_weight, None, None, None


def _row_weight_gradient(whole: Tensor, x: Tensor | Quantized, weight: Tensor, overlap: Overlap) -> Tensor | None:
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


class ColumnAdapter(Adapter):
    """An adapter with ``A [n r, in]`` whole on every rank and ``B [out/tp, r]`` split; ``r`` features are communicated.

    Args:
        adapter: the single-device adapter.
        down: ``A``.
        up: this rank's ``B``.
        section_sizes: this rank's output features of each section of the layer.
        shared: the state that all tensor-parallel layers share.
        tokens: the tokens that the layer receives under sequence parallelism.
        dropout: applied to the layer's input, or None.
    """

    def __init__(
        self,
        adapter: Adapter,
        down: nn.Parameter,
        up: nn.Parameter,
        section_sizes: Sequence[int],
        shared: SharedState,
        tokens: Tokens,
        dropout: nn.Module | None,
    ) -> None:
        super().__init__(down, up, adapter.units, section_sizes, adapter.adapted, adapter.scale, dropout)
        self.shared = shared
        self.tokens = tokens

    def meet(self, narrow: Tensor) -> Tensor:
        """``[T/tp, n r] -> [T, n r]`` under sequence parallelism; otherwise all-reduce the gradient in the backward."""
        # The collective acts on the `r` features between A and B, not on the layer's input: B's ranks need all tokens
        # of these.
        tokens = self.shared.tokens(self.tokens)
        if tokens == "share":
            return all_gather(narrow, self.shared.group, self.shared.sequence_dim)
        # Each rank's B sees part of the outputs, so the gradient of the narrow features is a sum over ranks.
        return copy(narrow, self.shared.group) if tokens == "whole" else narrow


class RowAdapter(Adapter):
    """An adapter with ``A [r, in/tp]`` split and ``B [out, r]`` whole on every rank. The layer sums over ranks.

    Args:
        adapter: the single-device adapter.
        down: this rank's ``A``.
        up: ``B``.
        shared: the state that all tensor-parallel layers share.
        dropout: applied to the layer's input, or None.
    """

    def __init__(
        self, adapter: Adapter, down: nn.Parameter, up: nn.Parameter, shared: SharedState, dropout: nn.Module | None
    ) -> None:
        super().__init__(down, up, adapter.units, adapter.section_sizes, adapter.adapted, adapter.scale, dropout)
        self.shared = shared

    def total(self, squares: Tensor) -> Tensor:
        """Sum over the ranks, which hold different input features of each row."""
        return all_reduce(squares, self.shared.group)


class RowStackAdapter(StackAdapter):
    """An adapter of ``down`` of stacked experts, with ``A [E, r, in/etp]`` split and ``B [E, out, r]`` whole.

    Args:
        adapter: the single-device adapter.
        mesh: the mesh of ranks.
    """

    def __init__(self, adapter: StackAdapter, mesh: ParallelMesh) -> None:
        super().__init__(adapter.A, adapter.B, adapter.scale, inner=1)
        self.magnitude = adapter.magnitude
        self.mesh = mesh

    def total(self, squares: Tensor) -> Tensor:
        """Sum over the ranks, which hold different input features of each row."""
        return all_reduce(squares, self.mesh.group("etp"))


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
