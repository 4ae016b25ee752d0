"""Rows of a table by their ids, with the gradient added to the rows of the table's main gradient, if it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.common import serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl
from megalight.ops.parameter import main_grad_of, put, state_of
from megalight.registry import Backend, BackendRegistry, choose


def reference_add_rows(main_grad: Tensor, ids: Tensor, grad: Tensor, write: bool) -> None:
    """Implement :data:`megalight.ops.embedding.AddRows`."""
    rows = len(main_grad)
    inside = ids < rows
    # Row 0 gets zeros from the tokens that have no row.
    grad = torch.where(inside.unsqueeze(-1), grad, 0)
    whole = torch.ops.aten.embedding_dense_backward(grad, torch.where(inside, ids, 0), rows, -1, False)
    put(main_grad, whole, write)


BLOCK = 512
"""Features of a program."""
ROWS = 16
"""Tokens that a program reads at once, after the first one of a run. Most runs have one."""


@jit
def _add_rows(
    main_grad: Value, sorted_ids: Value, order: Value, grad: Value,
    tokens: Value, rows: Value, size: Value, main_stride: Value, grad_stride: Value,
    ROWS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(0)
    row = tl.load(sorted_ids + first)
    before = tl.load(sorted_ids + first - 1, mask=first > 0, other=-1)
    if (row != before) & (row < rows):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < size
        token = tl.load(order + first).to(tl.int64)
        total = tl.load(grad + token * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        start = first + 1
        # Equal ids are side by side: as soon as one differs, the run has ended.
        running = tl.load(sorted_ids + start, mask=start < tokens, other=-1) == row
        while running:
            place = start + tl.arange(0, ROWS)
            same = tl.load(sorted_ids + place, mask=place < tokens, other=-1) == row
            token_of = tl.load(order + place, mask=same, other=0).to(tl.int64)
            source = grad + token_of[:, None] * grad_stride + column[None, :]
            part = tl.load(source, mask=same[:, None] & inside[None, :], other=0.0)
            total += tl.sum(part.to(tl.float32), 0)
            start += ROWS
            running = tl.load(sorted_ids + start, mask=start < tokens, other=-1) == row
        # int64: a table has more elements than an int32 offset can count.
        target = main_grad + row.to(tl.int64) * main_stride + column
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, total.to(main_grad.dtype.element_ty), mask=inside)


def triton_add_rows(main_grad: Tensor, ids: Tensor, grad: Tensor, write: bool) -> None:
    """Implement :data:`megalight.ops.embedding.AddRows`.

    Tokens are sorted by id. The program at the first token of a run of equal ids sums the run in float32, in the
    order of the tokens, and adds to the row once. So there are no atomics, and every run gives the same bits.
    """
    if write:
        main_grad.zero_()  # the memory holds anything when a step begins, and most rows get no gradient
    tokens, size = grad.shape
    if not tokens or not size:
        return
    # Stable: equal ids stay in the order of the tokens.
    sorted_ids, order = torch.sort(ids, stable=True)
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    block = min(BLOCK, next_power(size))
    _add_rows[(tokens, cdiv(size, block))](
        main_grad, sorted_ids, order, grad, tokens, len(main_grad), size, main_grad.stride(0), grad.stride(0),
        ROWS=ROWS, BLOCK=block, num_warps=4,
    )  # fmt: skip


class EmbeddingGradientSpec(NamedTuple):
    """A request to a gradient: device type, dtype of the gradient of the rows, dtype of the main gradient."""

    device: str
    dtype: torch.dtype
    main_dtype: torch.dtype


AddRows: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], None]
"""``(main_grad [rows, h], ids [T], grad [T, h], write)``. Ids that are not below ``rows`` name no row."""
EMBEDDING_GRADIENT: BackendRegistry[EmbeddingGradientSpec, AddRows] = BackendRegistry("embedding_gradient")
REGISTRIES = (EMBEDDING_GRADIENT,)
EXAMPLE = EmbeddingGradientSpec("cpu", torch.bfloat16, torch.float32)


def _triton_why_not(spec: EmbeddingGradientSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.main_dtype)


EMBEDDING_GRADIENT.register(Backend("triton", triton_add_rows, 10, _triton_why_not))
EMBEDDING_GRADIENT.register(Backend("reference", reference_add_rows, 0, serve_all))


def embedding(ids: Tensor, weight: Tensor, keep: Tensor | None = None) -> Tensor:
    """Look up ``weight[ids]``: ids ``[...]`` and a table ``[rows, h]`` give ``[..., h]``.

    If the table has a main gradient (:mod:`megalight.ops.parameter`), the gradient is added there row by row, and
    autograd gets None. It costs what the tokens cost, and not what the table does: autograd makes a gradient of the
    whole table for each micro-batch.

    Args:
        keep: bool ``[...]``: elsewhere the result is zero, and no row gets a gradient. None: everywhere.
    """
    if main_grad_of(weight) is None or not weight.requires_grad:
        found = F.embedding(ids, weight)
        return found if keep is None else found.masked_fill(~keep.unsqueeze(-1), 0)
    out: Tensor = apply(_Embedding, ids, weight, keep)
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, keep: Tensor | None) -> Tensor:
        # Kept by reference: a saved-tensor hook would return a tensor without its state.
        ctx.weight = weight
        ctx.save_for_backward(ids, keep)
        found = F.embedding(ids, weight)
        return found if keep is None else found.masked_fill_(~keep.unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ids, keep = ctx.saved_tensors
        state = state_of(ctx.weight)
        main_grad = state.main_grad
        assert main_grad is not None
        if keep is not None:
            # No row has this number.
            ids = torch.where(keep, ids, len(main_grad))
        run = choose(EMBEDDING_GRADIENT, EmbeddingGradientSpec(grad.device.type, grad.dtype, main_grad.dtype), "auto")
        run(main_grad, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]), state.touch())
        state.mark_grad_ready()
        return None, None, None
