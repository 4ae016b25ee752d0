"""``y = x W^T + b``, with the weight gradient accumulated in the parameter's main gradient, if it has one.

Backends add ``grad_y^T x`` to the main gradient, at once, or later if it is in a queue of :class:`WeightGradients`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable, recipe_of, save_cast, save_input, saved_input
from megalight.ops.batch_invariant import MODE, refuse
from megalight.ops.batch_invariant.matmul import product as invariant_product
from megalight.ops.common import HALF, cuda_why_not, fp8_why_not, last_contiguous, lazy, serve_all, triton_why_not, wide
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.linear import aligned
from megalight.ops.linear.aligned import Accumulate
from megalight.ops.linear.low_precision import LowPrecision, precision_of
from megalight.ops.parameter import ParameterState, main_grad_of, may_hide, put, state_of
from megalight.ops.quantize import Quantized
from megalight.ops.quantized_weight import QuantizedWeight, readable, stored_of
from megalight.ops.sum_rows import sum_rows
from megalight.registry import Backend, BackendRegistry, choose


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in] x [out, in] -> [..., out]``.

    If a weight or bias has a main gradient (:mod:`megalight.ops.parameter`), its gradient is added there, and autograd
    gets None. Otherwise it gets an ordinary gradient.

    If ``x`` has a recipe (:mod:`megalight.ops.autograd`), only the recipe is kept, and the backward computes ``x``
    again. If a weight has a precision (:mod:`megalight.ops.linear.low_precision`), its GEMMs use that. If it is
    quantized (:mod:`megalight.ops.quantized_weight`), GEMMs dequantize it, and the backward keeps only the quantized
    values.
    """
    # The state is read here once, and not by a function for each of its parts: every layer comes here several times.
    state: ParameterState | None = getattr(weight, "megalight", None)
    precision: LowPrecision | None = None if state is None else state.precision
    if MODE.on and not torch.is_grad_enabled():
        return product(x, weight, bias)
    if precision is not None and not torch.is_grad_enabled():
        # No backward will come: cast only what the forward product needs.
        return precision.product(x, weight, bias)
    if state is not None and state.stored is not None and not torch.is_grad_enabled():
        return _of_quantized(x, weight, bias, state.stored)
    own = state is not None and (state.main_grad is not None or precision is not None or state.stored is not None)
    # The plain case goes to torch, whose autograd is written in C++ and keeps fewer things on the host.
    if not (own or MODE.on) and recipe_of(x) is None and main_grad_of(bias) is None:
        if not torch.is_grad_enabled() and takes_gemv(x, weight):
            single: Tensor = single_product(x, weight, bias)
            return single
        # Here and below in place, as a function of its own would be called for every layer.
        odd = (weight.shape[0] | weight.shape[1]) % aligned.MULTIPLE and aligned.pays(weight, weight.shape)
        return aligned.product(x, weight, bias) if odd else F.linear(x, weight, bias)
    hidden = may_hide(x, weight, bias)
    out: Tensor = apply(_Linear, x, None, None, (weight, bias)) if hidden else apply(_Linear, x, weight, bias, None)
    return out


FEW = 64
"""Tokens up to which a weight in e4m3 is not decoded before its product."""


def _of_quantized(x: Tensor, weight: Tensor, bias: Tensor | None, stored: QuantizedWeight) -> Tensor:
    """``x [..., in]`` times a quantized weight, without a graph."""
    if x.numel() <= FEW * x.shape[-1] and x.numel() and reads_fp8(x, weight, stored):
        y: Tensor = few_tokens_product(x, weight, bias)
        return y
    return product(x, stored.values(), bias)


def reads_fp8(x: Tensor, weight: Tensor, stored: QuantizedWeight) -> bool:
    """Return whether kernels of few tokens read the values of a weight ``[..., out, in]`` themselves."""
    block = stored.data.shape[-1]
    return (
        stored.form == "fp8"
        and not stored.away
        and weight.shape[-1] % 16 == 0  # rows begin at multiples of 16 bytes
        and (block == weight.shape[-1] or block in (32, 64, 128, 256, 512))
        and _takes_half(x, weight)
        and fp8_why_not("cuda") is None
    )


def takes_gemv(x: Tensor, weight: Tensor) -> bool:
    """Return whether ``x`` is a single token for which the kernel of ``ops/linear/gemv.py`` is made."""
    if x.numel() != weight.shape[1]:
        return False
    state: ParameterState | None = getattr(weight, "megalight", None)
    if state is not None and state.stored is not None:
        return reads_fp8(x, weight, state.stored)
    # rows begin at multiples of 16 bytes
    return weight.is_contiguous() and not weight.shape[1] % 8 and _takes_half(x, weight)


def _takes_half(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and not MODE.on
        and weight.dtype in HALF
        and x.dtype == weight.dtype
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cuda")
        and triton_why_not("cuda") is None
    )


single_product = lazy("megalight.ops.linear.gemv", "gemv")
few_tokens_product = lazy("megalight.ops.linear.weight_only", "weight_only_product")


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b`` without a graph; ``out [n, out]`` needs ``x [n, in]`` and a weight of one plain dtype."""
    if MODE.on:
        return _invariant(x, weight, bias, out)
    if out is not None:
        weight = readable(weight)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    if (precision := precision_of(weight)) is not None:
        return precision.product(x, weight, bias)
    if (stored := stored_of(weight)) is not None:
        return _of_quantized(x, weight, bias, stored)
    odd = (weight.shape[0] | weight.shape[1]) % aligned.MULTIPLE and aligned.pays(weight, weight.shape)
    return aligned.product(x, weight, bias) if odd else F.linear(x, weight, bias)


def _invariant(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if precision_of(weight) is not None:
        refuse("products in 8 or 4 bits, whose scales follow from the whole batch")
    y = invariant_product(x, readable(weight), bias)
    return y if out is None else out.copy_(y)


def product_and_save(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, needed: bool) -> Tensor:
    """For the forward of an autograd function: return the product, and save ``x`` if the weight gradient is needed."""
    state: ParameterState | None = getattr(weight, "megalight", None)
    precision: LowPrecision | None = None if state is None else state.precision
    if MODE.on:
        save_input(ctx, x, needed)
        return _invariant(x, weight, bias)
    if precision is None:
        save_input(ctx, x, needed)
        if state is not None and state.stored is not None:
            weight = readable(weight)
        odd = (weight.shape[0] | weight.shape[1]) % aligned.MULTIPLE and aligned.pays(weight, weight.shape)
        return aligned.product(x, weight, bias) if odd else F.linear(x, weight, bias)
    # With a recipe, the input is computed again and cast again in the backward: the cast for the weight gradient would
    # only take memory.
    if not needed or recipe_of(x) is not None:
        save_input(ctx, x, needed)
        return precision.product(x, weight, bias)
    # One pass over x makes both casts: rows for this product, and columns for the weight gradient. Only the second is
    # kept.
    y, x_t = precision.product_and_cast(x, weight, bias)
    save_cast(ctx, x_t)
    return y


def input_gradient(grad_y: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """``grad_y [..., out] x weight [out, in] -> [..., in]``, in ``grad_y``'s dtype; ``out`` as in :func:`product`."""
    if out is not None:
        return torch.mm(grad_y, readable(weight), out=out)
    state: ParameterState | None = getattr(weight, "megalight", None)
    if state is not None:
        precision: LowPrecision | None = state.precision
        if precision is not None:
            return precision.input_gradient(grad_y, weight)
        if state.stored is not None:
            weight = readable(weight)
    weight = weight if weight.dtype == grad_y.dtype else weight.to(grad_y.dtype)
    odd = (weight.shape[0] | weight.shape[1]) % aligned.MULTIPLE and aligned.pays(weight, weight.shape)
    return aligned.input_gradient(grad_y, weight) if odd else grad_y @ weight


def accumulate_weight_gradient(grad_y: Tensor, x: Tensor | Quantized, weight: Tensor) -> Tensor | None:
    """Compute the gradient ``grad_y^T x`` of ``weight [out, in]``, summed over all leading dims.

    Args:
        grad_y: ``[..., out]``.
        x: ``[..., in]``; may be cast already if ``weight`` has a precision.
        weight: if it has a main gradient, the gradient is added there (in float32 if that is float32, without a
            temporary of that size on CUDA), and ``mark_grad_ready()`` is called. Inside
            :func:`deferring`, both happen later.

    Returns:
        None if the gradient goes into the main gradient, else the gradient in the weight's dtype.
    """
    state: ParameterState | None = getattr(weight, "megalight", None)
    if state is not None:
        if state.main_grad is not None:
            if (queue := queue_for(weight)) is not None:
                held = x.detach() if isinstance(x, Tensor) else x  # a saved tensor would keep its autograd graph alive
                queue.put(weight, grad_y, lambda: lambda: held)
            else:
                add_weight_gradient(weight, grad_y, x)
            return None
        precision: LowPrecision | None = state.precision
        if precision is not None:
            return precision.weight_gradient(grad_y, x, weight)
    assert isinstance(x, Tensor)
    grad_y = grad_y.reshape(-1, grad_y.shape[-1])
    # Under autocast, the saved input may still have its original dtype.
    x = x.reshape(-1, x.shape[-1]).to(grad_y.dtype)
    return (grad_y.T @ x).to(weight.dtype)


def accumulate_bias_gradient(grad_y: Tensor, bias: Tensor) -> Tensor | None:
    """Compute the gradient of ``bias [out]``: ``grad_y [..., out]`` summed over leading dims; returns as the above."""
    main_grad = main_grad_of(bias)
    grad_y = grad_y.reshape(-1, grad_y.shape[-1])
    if main_grad is None:
        return grad_y.sum(0).to(bias.dtype)
    state = state_of(bias)
    sum_rows(main_grad, grad_y, add=not state.touch())
    state.mark_grad_ready()
    return None


class _Linear(torch.autograd.Function):
    """A linear layer with a main gradient, a precision, or an input with a recipe.

    ``hidden`` is ``(weight, bias)`` in place of both arguments: see :func:`~megalight.ops.parameter.may_hide`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        hidden: tuple[Tensor, Tensor | None] | None,
    ) -> Tensor:
        # Parameters are kept by reference: a saved-tensor hook would return tensors without their state.
        if hidden is None:
            assert weight is not None
            ctx.needs = ctx.needs_input_grad[1:3]
        else:
            weight, bias = hidden
            ctx.needs = True, bias is not None
        ctx.weight, ctx.bias, ctx.x_dtype = weight, bias, x.dtype
        return product_and_save(ctx, x, weight, bias, ctx.needs[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        need_x, (need_weight, need_bias) = ctx.needs_input_grad[0], ctx.needs
        # The input gradient comes first: with deferred weight gradients it is all that the previous stage waits for.
        grad_x = input_gradient(grad_y, ctx.weight) if need_x else None
        if grad_x is not None and grad_x.dtype != ctx.x_dtype:
            grad_x = grad_x.to(ctx.x_dtype)
        grad_weight = accumulate_weight_gradient(grad_y, saved_input(ctx), ctx.weight) if need_weight else None
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if need_bias else None
        return grad_x, grad_weight, grad_bias, None


TILE = {"BLOCK_OUT": 128, "BLOCK_IN": 256, "BLOCK_TOKENS": 64, "GROUP": 8, "num_warps": 8, "num_stages": 4}
"""Shape of an output tile, tokens per step, and number of tile rows that share operands in the L2 cache."""


@jit
def _weight_gradient(
    main_grad: Value, grad_y: Value, x: Value,
    tokens: Value, size_out: Value, size_in: Value, main_stride: Value, grad_stride: Value, x_stride: Value,
    ADD: constexpr, BLOCK_OUT: constexpr, BLOCK_IN: constexpr, BLOCK_TOKENS: constexpr, GROUP: constexpr,
) -> None:  # fmt: skip
    tiles_out = tl.cdiv(size_out, BLOCK_OUT)
    tiles_in = tl.cdiv(size_in, BLOCK_IN)
    program = tl.program_id(0)
    # Programs are numbered group by group, so that tiles with the same operands run at the same time.
    group = program // (GROUP * tiles_in)
    first = group * GROUP
    height = tl.minimum(tiles_out - first, GROUP)
    within = program % (GROUP * tiles_in)
    row = (first + within % height) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = (within // height) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    token = tl.arange(0, BLOCK_TOKENS)
    # Rows and columns beyond the edge wrap around: they are computed but not stored, and need no masks.
    grad_tile = grad_y + token.to(tl.int64)[:, None] * grad_stride + (row % size_out)[None, :]
    x_tile = x + token.to(tl.int64)[:, None] * x_stride + (column % size_in)[None, :]
    target = main_grad + row.to(tl.int64)[:, None] * main_stride + column[None, :]
    stored = (row < size_out)[:, None] & (column < size_in)[None, :]
    # The sum starts from the old value. To load that at the end would need as many registers again.
    total = tl.load(target, mask=stored, other=0.0) if ADD else tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for start in range(0, tokens, BLOCK_TOKENS):
        inside = (start + token < tokens)[:, None]
        a = tl.load(grad_tile, mask=inside, other=0.0)
        # Only the summed dim needs a mask: zeros in both operands add nothing.
        b = tl.load(x_tile, mask=inside, other=0.0)
        total = tl.dot(tl.trans(a), b, total)
        grad_tile += BLOCK_TOKENS * grad_stride
        x_tile += BLOCK_TOKENS * x_stride
    tl.store(target, total, mask=stored)


def triton_weight_gradient(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    """Add ``grad_y^T x`` to float32 ``main_grad [out, in]``; operands ``[T, out]`` and ``[T, in]`` of one half dtype.

    ``write``: start the sum from zero, which overwrites ``main_grad``.
    """
    size_out, size_in = main_grad.shape
    # The kernel needs unit stride in the last dim.
    grad_y = last_contiguous(grad_y)
    x = last_contiguous(x)
    tiles = cdiv(size_out, TILE["BLOCK_OUT"]) * cdiv(size_in, TILE["BLOCK_IN"])
    _weight_gradient[(tiles,)](
        main_grad, grad_y, x, grad_y.shape[0], size_out, size_in, main_grad.stride(0), grad_y.stride(0), x.stride(0),
        ADD=not write, **TILE,
    )  # fmt: skip


class WeightGradientSpec(NamedTuple):
    """What a backend must support: device type, dtype of the operands, and dtype of the main gradient."""

    device: str
    dtype: torch.dtype
    main_dtype: torch.dtype


TALL = 4
"""Rows per column of a weight from which ``baddbmm`` is faster than ``addmm`` on an H200 (docs/performance/log.md)."""

WGRAD: BackendRegistry[WeightGradientSpec, Accumulate] = BackendRegistry("weight_gradient")
REGISTRIES: tuple[BackendRegistry[WeightGradientSpec, Any], ...] = (WGRAD,)
EXAMPLE = WeightGradientSpec("cpu", torch.bfloat16, torch.float32)


def _reference(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    dtype = torch.promote_types(wide(grad_y.dtype), main_grad.dtype)
    put(main_grad, grad_y.to(dtype).T @ x.to(dtype), write)


def _addmm(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    # With beta = 0, BLAS does not read the old content, so NaN left in the buffer does no harm.
    main_grad.addmm_(grad_y.T, x, beta=0 if write else 1)


def _addmm_why_not(spec: WeightGradientSpec) -> str | None:
    # Equal dtypes: the GEMM adds to its output itself (beta = 1), without a temporary.
    return None if spec.dtype == spec.main_dtype else f"needs a main gradient of the operands' type, {spec.dtype}"


def _addmm_fp32(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    rows, columns = main_grad.shape
    beta = 0 if write else 1
    if rows >= TALL * columns:
        batch = main_grad.unsqueeze(0)
        torch.baddbmm(batch, grad_y.T.unsqueeze(0), x.unsqueeze(0), beta=beta, out_dtype=torch.float32, out=batch)
    else:
        torch.addmm(main_grad, grad_y.T, x, beta=beta, out_dtype=torch.float32, out=main_grad)


def _half_to_fp32_why_not(spec: WeightGradientSpec) -> str | None:
    if spec.dtype not in HALF or spec.main_dtype != torch.float32:
        return "needs half operands and a float32 main gradient"
    return cuda_why_not(spec.device)


def _addmm_fp32_why_not(spec: WeightGradientSpec) -> str | None:
    return _half_to_fp32_why_not(spec) or _probe(spec.dtype, 1) or _probe(spec.dtype, TALL)


@lru_cache
def _probe(dtype: torch.dtype, height: int) -> str | None:
    """Test whether this torch release can add a half GEMM to a float32 matrix in place, and overwrite one.

    Args:
        dtype: type of the operands.
        height: rows per column of the matrix.
    """
    grad_y = torch.ones(16, 16 * height, dtype=dtype, device="cuda")
    x = torch.ones(16, 16, dtype=dtype, device="cuda")
    main_grad = torch.ones(16 * height, 16, dtype=torch.float32, device="cuda")
    # NaN shows whether a write reads the old content.
    written = torch.full_like(main_grad, float("nan"))
    try:
        _addmm_fp32(main_grad, grad_y, x, False)
        _addmm_fp32(written, grad_y, x, True)
    except (RuntimeError, TypeError) as error:
        return f"this torch refuses a float32 addend: {str(error).splitlines()[0]}"
    return None if bool(((main_grad == 17) & (written == 16)).all()) else "this torch gives a wrong sum"


def _triton_why_not(spec: WeightGradientSpec) -> str | None:
    return _half_to_fp32_why_not(spec) or triton_why_not(spec.device, spec.dtype)


WGRAD.register(Backend("addmm", _addmm, 30, _addmm_why_not))
WGRAD.register(Backend("addmm_fp32", _addmm_fp32, 20, _addmm_fp32_why_not))
WGRAD.register(Backend("triton", triton_weight_gradient, 10, _triton_why_not))
WGRAD.register(Backend("reference", _reference, 1, serve_all))


def add_weight_gradient(weight: Tensor, grad_y: Tensor, x: Tensor | Quantized) -> None:
    """Add ``grad_y^T x`` to the main gradient of ``weight``, ``[out, in]``, and report it.

    The first gradient of a step overwrites: see :mod:`megalight.ops.parameter`.

    Args:
        grad_y: ``[..., out]``; all leading dims are summed over.
        x: ``[..., in]``; may be cast already if ``weight`` has a precision.
    """
    state = state_of(weight)
    main_grad, write = state.main_grad, state.touch()
    assert main_grad is not None
    if write and not grad_y.numel():
        main_grad.zero_()  # a library's product of zero tokens may write nothing
    if state.precision is not None:
        state.precision.accumulate(main_grad, grad_y, x, write)
    else:
        assert isinstance(x, Tensor)
        if grad_y.dim() != 2:
            grad_y, x = grad_y.reshape(-1, grad_y.shape[-1]), x.reshape(-1, x.shape[-1])
        if x.dtype != grad_y.dtype:
            x = x.to(grad_y.dtype)
        accumulate = choose(WGRAD, WeightGradientSpec(grad_y.device.type, grad_y.dtype, main_grad.dtype))
        odd = (main_grad.shape[0] | main_grad.shape[1]) % aligned.MULTIPLE and aligned.pays(x, main_grad.shape)
        if odd and len(x):
            aligned.add_weight_gradient(accumulate, main_grad, grad_y, x, write)
        else:
            accumulate(main_grad, grad_y, x, write)
    state.mark_grad_ready()


Begin: TypeAlias = Callable[[], Callable[[], Any]]
"""Starts to get an input (by a collective, for example); the returned function waits for it. The input is a tensor, or
cast."""

Add: TypeAlias = Callable[[Tensor, Tensor, Any], None]
"""Adds the gradient of ``(weight, grad_y, x)`` to the weight's main gradient, and reports it."""


class WeightGradients:
    """A queue of weight gradients that are still to be computed, first in, first out.

    Schedules that split a backward pass in two (https://arxiv.org/abs/2401.10241) need this. The previous pipeline
    stage waits only for the input gradient, and weight gradients fill time that would be idle.

    Each entry holds the output gradient of a linear layer and its input, or this rank's share of it. The rest of the
    graph is freed. All work runs on the current stream, so call :meth:`run` on the stream of the backward pass.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Tensor, Begin, Add]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, weight: Tensor, grad_y: Tensor, begin: Begin, add: Add | None = None) -> None:
        """Queue ``grad_y^T x`` for the weight's main gradient; ``begin()()`` will return ``x [..., in]``.

        ``begin`` should hold detached tensors, because others keep the graph alive. ``add`` computes the product;
        None: that of a dense layer.
        """
        state_of(weight).expect_late()
        self._waiting.append((weight, grad_y, begin, add or add_weight_gradient))

    @torch.no_grad()
    def run(self) -> None:
        """Compute all, and call ``mark_grad_ready()`` for each. The next input is fetched during each product.

        Ranks that share layers must run the same ones in the same order, because getting inputs may need collectives.
        """
        finish = self._waiting[0][2]() if self._waiting else None
        while finish is not None:
            x = finish()
            weight, grad_y, _, add = self._waiting.popleft()
            # Begin to fetch the next input before this product is queued, so that communication and product overlap.
            finish = self._waiting[0][2]() if self._waiting else None
            state_of(weight).begin_late()
            add(weight, grad_y, x)
            del x, grad_y  # free the memory before the next input arrives


_current: list[WeightGradients] = []
"""The active queues; the last one is used. Not thread-local, as autograd on CUDA runs backwards in its own thread."""


@contextmanager
def deferring(queue: WeightGradients) -> Iterator[None]:
    """During a backward pass, put weight gradients of linear layers into ``queue`` if possible.

    Weights without a main gradient get theirs at once. Gradients of biases, norms and embeddings are cheap, and are
    computed at once too. So is that of an output layer fused with the loss, because its logits would have to be kept.
    """
    _current.append(queue)
    try:
        yield
    finally:
        _current.pop()


def queue_for(weight: Tensor) -> WeightGradients | None:
    """Return the queue for the gradient of ``weight``; None: compute it now."""
    return _current[-1] if _current and main_grad_of(weight) is not None else None
