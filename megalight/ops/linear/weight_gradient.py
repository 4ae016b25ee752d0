"""Weight gradients: backends that add ``grad_y^T x`` to the main gradient, and weight gradients that are deferred."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.common import HALF, cuda_why_not, last_contiguous, serve_all, triton_why_not, wide
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.linear import aligned
from megalight.ops.linear.aligned import Accumulate
from megalight.ops.parameter import main_grad_of, put, state_of
from megalight.ops.quantize import Quantized
from megalight.registry import Backend, BackendRegistry, choose

TILE = {"BLOCK_OUT": 128, "BLOCK_IN": 256, "BLOCK_TOKENS": 64, "GROUP": 8, "num_warps": 8, "num_stages": 4}
"""Shape of an output tile, tokens per step, and number of tile rows that share operands in the L2 cache."""


@jit
def _accumulate(
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


def accumulate(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    """Add ``grad_y^T x`` to float32 ``main_grad [out, in]``; operands ``[T, out]`` and ``[T, in]`` of one half dtype.

    ``write``: start the sum from zero, which overwrites ``main_grad``.
    """
    size_out, size_in = main_grad.shape
    # The kernel needs unit stride in the last dim.
    grad_y = last_contiguous(grad_y)
    x = last_contiguous(x)
    tiles = cdiv(size_out, TILE["BLOCK_OUT"]) * cdiv(size_in, TILE["BLOCK_IN"])
    _accumulate[(tiles,)](
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
WGRAD.register(Backend("triton", accumulate, 10, _triton_why_not))
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
