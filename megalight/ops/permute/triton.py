"""Grouping of tokens by expert: three kernels find the rows, one copies tokens to them, one sums them.

To find rows, pairs are cut into blocks. The first kernel counts each expert's pairs in each block, the second sums the
counts of earlier blocks, and the third numbers the pairs of a block. So rows are in the order of tokens in every run.
Few pairs, as in decode steps, are compared with each other by one kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl
from megalight.ops.permute import Permutation

TILE = 16384
"""Elements of a tile of pairs by experts."""
SCAN = {"ROWS": 128, "COLUMNS": 16}
"""Blocks of pairs that the second kernel sums at once, and experts of a program."""
BLOCK = 4096
"""Features that a program copies at once."""


@jit
def _count(
    experts: Value, counts: Value, pairs: Value, num_experts: Value, PAIRS: constexpr, EXPERTS: constexpr
) -> None:
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.arange(0, EXPERTS)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=-1)
    # One-hot `[PAIRS, EXPERTS]`: its sum over pairs counts, and its running sum numbers. Pairs without an expert are
    # all 0.
    ours = (chosen[:, None] == expert[None, :]).to(tl.int32)
    tl.store(counts + block * num_experts + expert, tl.sum(ours, 0), mask=expert < num_experts)


@jit
def _scan(
    counts: Value, sizes: Value, blocks: Value, num_experts: Value, most: Value, ROWS: constexpr, COLUMNS: constexpr
) -> None:
    """Replace the counts of each block by those of all earlier blocks, and write the sums, at most ``most``."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, blocks, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < blocks)[:, None] & (expert < num_experts)[None, :]
        place = counts + row[:, None] * num_experts + expert[None, :]
        found = tl.load(place, mask=inside, other=0)
        # An exclusive running sum: the count of all earlier blocks. Blocks are walked in order by one program per few
        # experts, because atomics would number pairs in an order that differs from run to run.
        tl.store(place, total[None, :] + tl.cumsum(found, 0) - found, mask=inside)
        total += tl.sum(found, 0)
    tl.store(sizes + expert, tl.minimum(total, most), mask=expert < num_experts)


@jit
def _place(
    experts: Value, counts: Value, sizes: Value, positions: Value, offsets: Value, pairs: Value, num_experts: Value,
    rows: Value,
    ALIGNMENT: constexpr, CAPACITY: constexpr, PAIRS: constexpr, EXPERTS: constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    size = tl.load(sizes + expert, mask=known, other=0)
    padded = (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    if CAPACITY:
        # With a capacity, groups start at multiples of it, however many tokens they have.
        padded = tl.where(known, CAPACITY, 0)
    # Every program computes all offsets from the E sizes itself: that is cheaper than a fourth kernel.
    end = tl.cumsum(padded, 0)
    if block == 0:
        tl.store(offsets + expert, tl.minimum(end, rows), mask=known)
    earlier = tl.load(counts + block * num_experts + expert, mask=known, other=0)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=-1)
    ours = (chosen[:, None] == expert[None, :]).to(tl.int32)
    within = (tl.cumsum(ours, 0) - ours + earlier[None, :]) * ours
    # each row of `ours` has at most a single one, so sums over experts pick the value of a pair's own
    place = tl.sum(within, 1)
    position = place + tl.sum(ours * (end - padded)[None, :], 1)
    kept = (place < tl.sum(ours * size[None, :], 1)) & (position < rows)
    tl.store(positions + pair, tl.where(kept, position, -1), mask=pair < pairs)


@jit
def _compare(
    experts: Value, sizes: Value, positions: Value, offsets: Value, pairs: Value, num_experts: Value, rows: Value,
    blocks: Value,
    OWN: constexpr, OTHERS: constexpr,
) -> None:  # fmt: skip
    """Count the pairs before each of ``OWN`` pairs: those of earlier experts, and earlier ones of its own.

    The programs after the first ``blocks`` count the pairs of ``OWN`` experts, and those up to them.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, OWN)
    place = tl.arange(0, OTHERS)
    below = tl.zeros((OWN,), tl.int32)
    equal = tl.zeros((OWN,), tl.int32)
    if block < blocks:
        own = block * OWN + lane
        inside = own < pairs
        expert = tl.load(experts + own, mask=inside, other=-1)
        until = own
    else:
        own = (block - blocks) * OWN + lane
        inside = own < num_experts
        expert = own.to(experts.dtype.element_ty)
        until = tl.zeros((OWN,), tl.int32) + pairs
    for start in range(0, pairs, OTHERS):
        other = start + place
        chosen = tl.load(experts + other, mask=other < pairs, other=-1)
        counts = (chosen >= 0) & (chosen < num_experts)
        below += tl.sum((counts[None, :] & (chosen[None, :] < expert[:, None])).to(tl.int32), 1)
        same = counts[None, :] & (chosen[None, :] == expert[:, None])
        equal += tl.sum((same & (other[None, :] < until[:, None])).to(tl.int32), 1)
    position = below + equal
    if block < blocks:
        kept = (expert >= 0) & (expert < num_experts) & (position < rows)
        tl.store(positions + own, tl.where(kept, position, -1), mask=inside)
    else:
        tl.store(sizes + own, equal, mask=inside)
        tl.store(offsets + own, tl.minimum(position, rows), mask=inside)


FEW = 2048
"""Pairs up to which each is compared with all others."""
COMPARED = {"OWN": 16, "OTHERS": 512, "num_warps": 4}


def permutation(experts: Tensor, num_experts: int, alignment: int, capacity: int | None, rows: int) -> Permutation:
    """Implement :func:`megalight.ops.permute.permutation`."""
    experts = experts.contiguous()
    pairs, width = experts.numel(), max(16, next_power(num_experts))
    # The tile of pairs by experts must stay in registers, so more experts mean fewer pairs per program.
    tile = {"PAIRS": max(16, TILE // width), "EXPERTS": width, "num_warps": 8}
    blocks = max(1, cdiv(pairs, tile["PAIRS"]))
    positions = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
    sizes, offsets = torch.empty(2, num_experts, dtype=torch.int32, device=experts.device).unbind()
    if pairs <= FEW and alignment == 1 and capacity is None:
        own = cdiv(pairs, COMPARED["OWN"])
        _compare[(own + cdiv(num_experts, COMPARED["OWN"]),)](
            experts, sizes, positions, offsets, pairs, num_experts, rows, own, **COMPARED
        )
        return Permutation(positions, sizes, offsets, rows)
    counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=experts.device)
    _count[(blocks,)](experts, counts, pairs, num_experts, **tile)
    most = pairs if capacity is None else capacity
    _scan[(cdiv(num_experts, SCAN["COLUMNS"]),)](counts, sizes, blocks, num_experts, most, **SCAN, num_warps=4)
    _place[(blocks,)](
        experts, counts, sizes, positions, offsets, pairs, num_experts, rows,
        ALIGNMENT=alignment, CAPACITY=capacity or 0, **tile,
    )  # fmt: skip
    return Permutation(positions, sizes, offsets, rows)


@jit
def _zero(
    expert: Value, sizes: Value, offsets: Value, rows: Value, weights: Value, num_experts: Value, num_rows: Value,
    first: Value, size: Value,
    WEIGHTS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write zeros to the padding of one group, and to this program's share of the rows after the last group.

    Of rows with ``size`` features, these are the next ``BLOCK`` from ``first``.
    """
    column = first + tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), rows.dtype.element_ty)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0) + tl.load(sizes + expert)
    # Products treat a group's padding like its tokens. Zeros add nothing to weight gradients.
    for row in range(start, tl.load(offsets + expert)):
        tl.store(rows + tl.cast(row, tl.int64) * size + column, zeros, mask=column < size)
        if WEIGHTS:
            tl.store(weights + row, 0.0)
    # Rows after the last group are dealt out to the experts' programs, one every E rows.
    for row in range(tl.load(offsets + num_experts - 1) + expert, num_rows, num_experts):
        tl.store(rows + tl.cast(row, tl.int64) * size + column, zeros, mask=column < size)
        if WEIGHTS:
            tl.store(weights + row, 0.0)


@jit
def _scatter(
    x: Value, probs: Value, positions: Value, sizes: Value, offsets: Value, rows: Value, weights: Value, tokens: Value,
    num_experts: Value, num_rows: Value, size: Value,
    WEIGHTS: constexpr, K: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """One program per token copies it to its rows; one per expert pads its group."""
    program = tl.program_id(0)
    if program < tokens:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < size
        # Read once, written k times.
        value = tl.load(x + program.to(tl.int64) * size + column, mask=inside, other=0.0)
        for j in tl.static_range(K):
            row = tl.load(positions + program * K + j)
            tl.store(rows + row.to(tl.int64) * size + column, value, mask=inside & (row >= 0))
            if WEIGHTS:
                # Of the programs that copy parts of one token, the first writes its probabilities.
                there = (row >= 0) & (tl.program_id(1) == 0)
                tl.store(weights + row, tl.load(probs + program * K + j), mask=there)
    else:
        first = tl.program_id(1) * BLOCK
        _zero(program - tokens, sizes, offsets, rows, weights, num_experts, num_rows, first, size, WEIGHTS, BLOCK)


@jit
def _gather(
    rows: Value, probs: Value, positions: Value, weights: Value, out: Value, grad_probs: Value, size: Value,
    SCALED: constexpr, WEIGHTS: constexpr, K: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """One program per token sums its rows, times ``probs`` if scaled. ``WEIGHTS``: it also gets those of its rows."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        # The k terms are added in a fixed order in float32, and rounded once: no atomics, the same result in every run.
        row = tl.load(positions + token * K + j)
        value = tl.load(rows + row.to(tl.int64) * size + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if SCALED:
            value *= tl.load(probs + token * K + j).to(tl.float32)
        total += value
        if WEIGHTS:
            found = tl.load(weights + row, mask=row >= 0, other=0.0)
            tl.store(grad_probs + token * K + j, found, mask=tl.program_id(1) == 0)
    tl.store(out + token.to(tl.int64) * size + column, total.to(out.dtype.element_ty), mask=inside)


@jit
def _scatter_scaled(
    grad: Value, rows: Value, probs: Value, positions: Value, sizes: Value, offsets: Value, grad_rows: Value,
    grad_probs: Value, tokens: Value, num_experts: Value, num_rows: Value, size: Value,
    K: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Gradients of a weighted sum: of its rows, and of its weights."""
    program = tl.program_id(0)
    if program < tokens:
        for j in tl.static_range(K):
            row = tl.load(positions + program * K + j)
            weight = tl.load(probs + program * K + j).to(tl.float32)
            product = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, size, BLOCK):
                column = start + tl.arange(0, BLOCK)
                inside = (column < size) & (row >= 0)
                place = row.to(tl.int64) * size + column
                value = tl.load(grad + program.to(tl.int64) * size + column, mask=inside, other=0.0).to(tl.float32)
                # The gradient of a probability is the dot product of the token's gradient `[h]` and the row that it
                # weighted. The program has the whole row, so that the sum needs no second kernel.
                product += value * tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
                tl.store(grad_rows + place, (weight * value).to(grad_rows.dtype.element_ty), mask=inside)
            tl.store(grad_probs + program * K + j, tl.sum(product, 0))
    else:
        expert = program - tokens
        for start in range(0, size, BLOCK):
            _zero(expert, sizes, offsets, grad_rows, None, num_experts, num_rows, start, size, False, BLOCK)


@lru_cache
def _tile(size: int) -> dict[str, int]:
    """Return the number of features per program, and of warps: 16 elements per thread."""
    block = min(BLOCK, next_power(size))
    return {"BLOCK": block, "num_warps": min(8, max(1, block // 512))}


def scatter(x: Tensor, where: Permutation, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return each token's copies in its rows, zeros in all others, and the probabilities of the rows."""
    (tokens, k), size, num_experts = where.positions.shape, x.shape[1], where.sizes.shape[0]
    rows = x.new_empty(where.rows, size)
    weights = None if probs is None else probs.new_empty(where.rows)
    tile = _tile(size)
    _scatter[(tokens + num_experts, cdiv(size, tile["BLOCK"]))](
        x.contiguous(), None if probs is None else probs.contiguous(), where.positions, where.sizes, where.offsets,
        rows, weights, tokens, num_experts, where.rows, size,
        WEIGHTS=probs is not None, K=k, **tile,
    )  # fmt: skip
    return rows, weights


def gather(
    rows: Tensor, where: Permutation, probs: Tensor | None = None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of each token's rows, and each pair's entry of ``weights [R]``."""
    (tokens, k), size = where.positions.shape, rows.shape[1]
    out = rows.new_empty(tokens, size)
    picked = None if weights is None else weights.new_empty(tokens, k)
    tile = _tile(size)
    if tokens:
        _gather[(tokens, cdiv(size, tile["BLOCK"]))](
            rows.contiguous(), None if probs is None else probs.contiguous(), where.positions,
            None if weights is None else weights.contiguous(), out, picked, size,
            SCALED=probs is not None, WEIGHTS=weights is not None, K=k, **tile,
        )  # fmt: skip
    return out, picked


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, where: Permutation) -> tuple[Tensor, Tensor | None]:
        ctx.where, ctx.size, ctx.dtype = where, x.shape[1], x.dtype
        ctx.set_materialize_grads(False)
        return scatter(x, where, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor | None, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        where: Permutation = ctx.where
        if grad_rows is None:
            if grad_weights is None:
                return None, None, None
            # Only the probabilities were used: the tokens' gradient is zero, but must have its shape.
            grad_rows = grad_weights.new_zeros(where.rows, ctx.size, dtype=ctx.dtype)
        grad_x, grad_probs = gather(grad_rows, where, weights=grad_weights)
        return grad_x, grad_probs, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor | None, where: Permutation) -> Tensor:
        ctx.where = where
        # Without weights, the backward only copies gradients, so the rows need not be kept.
        ctx.save_for_backward(*(() if probs is None else (rows, probs)))
        return gather(rows, where, probs)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        where: Permutation = ctx.where
        if not ctx.saved_tensors:
            return scatter(grad, where, None)[0], None, None
        rows, probs = ctx.saved_tensors
        (tokens, k), size, num_experts = where.positions.shape, rows.shape[1], where.sizes.shape[0]
        grad_rows, grad_probs = torch.empty_like(rows), torch.empty_like(probs)
        _scatter_scaled[(tokens + num_experts,)](
            grad.contiguous(), rows.contiguous(), probs.contiguous(), where.positions, where.sizes, where.offsets,
            grad_rows, grad_probs, tokens, num_experts, where.rows, size,
            K=k, **_tile(size),
        )  # fmt: skip
        return grad_rows, grad_probs, None


def permute(x: Tensor, where: Permutation, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Implement :func:`megalight.ops.permute.permute`."""
    out: tuple[Tensor, Tensor | None] = apply(_Permute, x, probs, where)
    return out


def unpermute(rows: Tensor, where: Permutation, probs: Tensor | None) -> Tensor:
    """Implement :func:`megalight.ops.permute.unpermute`."""
    out: Tensor = apply(_Unpermute, rows, probs, where)
    return out
