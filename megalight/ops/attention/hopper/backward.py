"""The backward pass of attention on Hopper, for heads of 128 features: five products, in one kernel.

A program has 128 keys, and goes over the blocks of 64 queries that see them, head by head of the group, or of a part of
it. One warp loads queries, gradients of outputs and their numbers. Two groups of four warps have 64 keys each and keep
their gradients in registers. Scores lie as keys times queries: weights are a left factor in registers as they are. For
the gradients of queries, whose sums go over all keys, both groups write their slopes to shared memory, each multiplies
all of them with half of the keys' features, and one more warp has the copy engine add the result to float32 in memory.
These sums come in any order: deterministic runs have the other kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention.hopper import KEYS
from megalight.ops.attention.hopper.gluon import (
    Descriptor,
    add_to_memory,
    described,
    fence_async_shared,
    gl,
    jit_for_all,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from megalight.ops.attention.hopper.gluon import constexpr as gluon_constexpr
from megalight.ops.attention.hopper.gluon import jit as gluon_jit
from megalight.ops.attention.hopper.programs import ROWS, programs, together
from megalight.ops.attention.triton_blocks import factors, flags, queries_of, table_of, tanh, visible
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.types import PackedSequences

WIDTH = 128
"""Numbers in a line of the matrix of sums."""

LINES = ROWS * ROWS // WIDTH
"""Lines of a part, which has as many features as queries."""


@lru_cache(maxsize=64)
def query_blocks(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the blocks of queries by number, ``[n, 2]`` int32: the first token, and how many tokens there are.

    A block of 64 queries and 64 features is one piece of memory: the copy engine adds it as a whole, and threads
    write 16 bytes each to shared memory, side by side. In rows of tokens both took longer
    (docs/performance/log.md).
    """
    rows: list[tuple[int, ...]] = []
    start = 0
    for length in lengths:
        rows += [(start + first, min(ROWS, length - first)) for first in range(0, length, ROWS)]
        start += length
    return table_of(rows, device)


@jit
def _late_first(turn: Value, key_heads: Value, some: Value, GROUP: constexpr) -> Any:
    """Return the head of a turn: those whose sums are added to last come first, as they are still in the cache."""
    member = turn % (some * GROUP)
    key_head = key_heads - (turn // (some * GROUP) + 1) * some + member % some
    return key_head * GROUP + GROUP - 1 - member // some


@jit
def _attention_prepare(
    out: Value, grad: Value, delta: Value, sums: Value, tickets: Value, tokens: Value, heads: Value, blocks: Value,
    some: Value, count: Value,
    GROUP: constexpr,
) -> None:  # fmt: skip
    """Set one block's sums and 64 tickets to 0, and multiply 8 tokens' outputs of 8 heads with their gradients."""
    program = tl.program_id(0)
    places = program * 64 + tl.arange(0, 64)
    tl.store(tickets + places, tl.zeros((64,), tl.int32), mask=places < count)
    if program < heads * blocks:
        # The sums that are needed first are set last.
        head = _late_first(program // blocks, heads // GROUP, some, GROUP)
        piece = sums + (head * blocks + program % blocks).to(tl.int64) * 8192
        tl.store(piece + tl.arange(0, 8192), tl.zeros((8192,), tl.float32))
    parts = tl.cdiv(heads, 8)
    row = (program // parts * 8 + tl.arange(0, 8))[:, None]
    head = (program % parts * 8 + tl.arange(0, 8))[None, :]
    within = (row < tokens) & (head < heads)
    place = ((row * heads + head).to(tl.int64) * 128)[:, :, None] + tl.arange(0, 128)[None, None, :]
    x = tl.load(out + place, mask=within[:, :, None], other=0.0).to(tl.float32)
    y = tl.load(grad + place, mask=within[:, :, None], other=0.0).to(tl.float32)
    tl.store(delta + head * tokens + row, tl.sum(x * y, 2), mask=within)


def prepare(out: Tensor, grad: Tensor, blocks: int, group: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums over features of outputs times their gradients ``[H, T]``, sums of 0, and tickets of 0.

    Args:
        out: ``[T, H, 128]``.
        grad: ``[T, H, 128]``, contiguous.
        blocks: number of blocks of queries.
        group: heads of queries of a head of keys.
        count: number of tickets.
    """
    tokens, heads, _ = out.shape
    delta = torch.empty(heads, tokens, dtype=torch.float32, device=out.device)
    sums = torch.empty(heads * blocks * 2 * LINES, WIDTH, dtype=torch.float32, device=out.device)
    tickets = torch.empty(max(1, count), dtype=torch.int32, device=out.device)
    grid = (max(heads * blocks, cdiv(tokens, 8) * cdiv(heads, 8), cdiv(count, 64)),)
    some = together(heads // group)
    _attention_prepare[grid](
        out, grad, delta, sums, tickets, tokens, heads, blocks, some, count, GROUP=group, num_warps=4
    )
    return delta, sums, tickets


@jit
def _attention_round(
    sums: Value, out: Value, table: Value, slope: Value, blocks: Value, heads: Value, some: Value, GROUP: constexpr
) -> None:
    block = tl.program_id(0)
    head = _late_first(tl.program_id(1), heads // GROUP, some, GROUP)
    start = tl.load(table + 2 * block)
    rows = tl.load(table + 2 * block + 1)
    inside = tl.arange(0, 64)
    for part in tl.static_range(2):
        piece = sums + ((head * blocks + block) * 2 + part).to(tl.int64) * 4096
        x = (tl.load(piece + tl.arange(0, 4096)) * slope).to(out.dtype.element_ty)
        # Features in eights, warps, rows and features of a thread's corner, second row, second feature.
        x = x.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, 64)
        place = ((start + inside).to(tl.int64) * heads + head)[:, None] * 128 + part * 64 + inside[None, :]
        tl.store(out + place, x, mask=(inside < rows)[:, None])


def round_sums(sums: Tensor, out: Tensor, table: Tensor, slope: float, group: int) -> None:
    """Multiply sums by ``slope`` and round them to ``out`` ``[T, H, 128]``; ``group`` is as in :func:`prepare`."""
    heads: Any = out.shape[1]
    some = together(heads // group)
    _attention_round[(len(table), heads)](sums, out, table, slope, len(table), heads, some, GROUP=group, num_warps=4)


BLOCKS: dict[str, Any] = {"REGISTERS": 240, "num_warps": 4}
"""Registers of a thread that multiplies."""

FLAT = gl.NVMMASharedLayout(0, 32, 2)
"""How sums lie in shared memory: as in memory."""


@gluon_jit
def _turn(step: Value, count: Value) -> Any:
    """Return the block of queries, and the head of the group, of a step: head by head, from the last block down."""
    return count - 1 - step % count, step // count


@gluon_jit
def _load(
    q: Value, grad: Value, lse: Value, delta: Value, k: Value, v: Value, q_blocks: Value, grad_blocks: Value,
    lse_rows: Value, delta_rows: Value, k_block: Value, v_block: Value, ready: Value, q_full: Value, grad_full: Value,
    sum_full: Value, query_row: Value, query_stop: Value, key_row: Value, count: Value,
    tokens: Value, key_head: Value, head: Value, members: Value, head_step: Value, key_step: Value, value_step: Value,
) -> None:  # fmt: skip
    """Load the keys and values, and the queries of all steps."""
    mbarrier.expect(ready, 2 * 128 * 128 * 2)
    tma.async_copy_global_to_shared(k, [key_row, key_head * key_step], ready, k_block.index(0))
    tma.async_copy_global_to_shared(v, [key_row, key_head * value_step], ready, v_block.index(0))
    inside = gl.arange(0, 64, gl.BlockedLayout([2], [32], [1], [0]))
    for step in range(members * count):
        block, member = _turn(step, count)
        row = query_row + block * 64
        # Rows of the next sequence get weights of 0.
        within = row + inside < query_stop
        row_lse = gl.load(lse + (head + member) * tokens + row + inside, mask=within, other=float("inf"))
        row_delta = gl.load(delta + (head + member) * tokens + row + inside, mask=within, other=0.0)
        stage = step % 2
        # Groups that have stored sums are done with a block.
        mbarrier.wait(sum_full.index(0), step & 1, pred=step >= 2)
        mbarrier.wait(sum_full.index(1), step & 1, pred=step >= 2)
        bar = q_full.index(stage)
        mbarrier.expect(bar, 64 * 128 * 2)
        tma.async_copy_global_to_shared(q, [row, (head + member) * head_step], bar, q_blocks.index(stage))
        lse_rows.index(stage).store(row_lse)
        delta_rows.index(stage).store(row_delta)
        gl.thread_barrier()
        mbarrier.arrive(bar, count=1)
        bar = grad_full.index(stage)
        mbarrier.expect(bar, 64 * 128 * 2)
        tma.async_copy_global_to_shared(grad, [row, (head + member) * 128], bar, grad_blocks.index(stage))


@gluon_jit
def _add(
    sums: Value, sum_blocks: Value, sum_full: Value, sum_empty: Value, count: Value, head: Value, members: Value,
    base: Value, blocks: Value,
) -> None:  # fmt: skip
    """Add what all steps give to the gradients of queries to memory."""
    for step in range(members * count):
        block, member = _turn(step, count)
        line = ((head + member) * blocks + base + block) * 64
        phase = step & 1
        mbarrier.wait(sum_full.index(0), phase)
        add_to_memory(sums, [line, 0], sum_blocks.index(0))
        mbarrier.wait(sum_full.index(1), phase)
        add_to_memory(sums, [line + 32, 0], sum_blocks.index(1))
        tma.store_wait(1)
        mbarrier.arrive(sum_empty.index(0), count=1)
        tma.store_wait(0)
        mbarrier.arrive(sum_empty.index(1), count=1)


@gluon_jit
def _multiply(
    PART: gluon_constexpr, q_blocks: Value, grad_blocks: Value, lse_rows: Value, delta_rows: Value, k_block: Value,
    v_block: Value, slope_blocks: Value, sum_blocks: Value, ready: Value, q_full: Value,
    grad_full: Value, sum_full: Value, sum_empty: Value, met: Value,
    key_out: Value, value_out: Value, length: Value, key_start: Value, num_keys: Value, first: Value, begin: Value,
    edge: Value, whole: Value, count: Value, scale: Value, cap: Value, slope: Value, window: Value, key_head: Value,
    key_heads: Value, members: Value, slot: Value, part: Value, parts: Value, partial: Value, tickets: Value,
    CAUSAL: gluon_constexpr, WINDOW: gluon_constexpr, CAPPED: gluon_constexpr, FAST: gluon_constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of half of the keys, and what all keys give to half of the features of queries."""
    scores_layout: gluon_constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout: gluon_constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    left_layout: gluon_constexpr = gl.DotOperandLayout(0, layout, 2)
    across: gluon_constexpr = gl.SliceLayout(0, scores_layout)
    keys = first + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores_layout))
    key_total = gl.zeros([64, 128], gl.float32, layout)
    value_total = gl.zeros([64, 128], gl.float32, layout)
    zero = gl.zeros([64, 64], gl.float32, scores_layout)
    steps = members * count
    mbarrier.wait(ready, 0)
    if steps > 0:
        mbarrier.wait(q_full.index(0), 0)
        key = k_block.index(0).slice(PART * 64, 64, 0)
        scores = warpgroup_mma(key, q_blocks.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, (scores,))
        row = begin + count * 64
        for step in range(steps):
            stage = step % 2
            # From the last block of queries down, head by head.
            row = gl.where(row == begin, begin + count * 64, row) - 64
            # 0, which the compiler does not know. Else it computes all addresses before the loop, and spills them.
            none = gl.where(row < 0, 1, 0)
            key = k_block.index(none).slice(PART * 64, 64, 0)
            value = v_block.index(none).slice(PART * 64, 64, 0)
            features = k_block.index(none).slice(PART * 64, 64, 1)
            pulled = grad_blocks.index(stage)
            mbarrier.wait(grad_full.index(stage), (step // 2) & 1)
            slopes = warpgroup_mma(value, pulled.permute((1, 0)), zero, use_acc=False, is_async=True)
            row_lse = lse_rows.index(stage).load(across)
            if CAPPED:
                # With both products there, the tangent need not be kept.
                curved = tanh(scores * scale, FAST)
                slopes, curved = warpgroup_mma_wait(0, (slopes, curved))
                row_delta = delta_rows.index(stage).load(across)
                slopes = (slopes - row_delta[None, :]) * (1 - curved * curved)
                weights = gl.exp2(curved * cap - row_lse[None, :])
            else:
                weights = gl.exp2(scores * scale - row_lse[None, :])
            if (row < edge) | (row + 64 > whole):
                # Rows of the next sequence, and its keys, get weights of 0.
                rows = row + gl.arange(0, 64, across)
                seen = visible((rows + (num_keys - length))[None, :], keys[:, None], num_keys, window, CAUSAL, WINDOW)
                weights = gl.where(seen, weights, 0.0)
            narrow = gl.convert_layout(weights.to(pulled.dtype), left_layout)
            value_total = warpgroup_mma(narrow, pulled, value_total, is_async=True)
            if CAPPED:
                slopes = weights * slopes
            else:
                slopes, weights = warpgroup_mma_wait(1, (slopes, weights))
                row_delta = delta_rows.index(stage).load(across)
                slopes = weights * (slopes - row_delta[None, :])
            narrow = slopes.to(pulled.dtype)
            # Two blocks of slopes: a group that writes the next has met the other, which has read the one before.
            turn = step % 2
            slope_blocks.index(turn).slice(PART * 64, 64, 0).store(narrow)
            left = gl.convert_layout(narrow, left_layout)
            key_total = warpgroup_mma(left, q_blocks.index(stage), key_total, is_async=True)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(met.index(turn), count=1)
            mbarrier.wait(met.index(turn), (step // 2) & 1)
            sum_ = warpgroup_mma(slope_blocks.index(turn).permute((1, 0)), features, zero, use_acc=False, is_async=True)
            value_total, key_total = warpgroup_mma_wait(1, (value_total, key_total))
            # The scores of the next step run while sums are stored; after the last step, its own, which nothing reads.
            after = gl.minimum(step + 1, steps - 1)
            mbarrier.wait(q_full.index(after % 2), (after // 2) & 1)
            scores = warpgroup_mma(key, q_blocks.index(after % 2).permute((1, 0)), zero, use_acc=False, is_async=True)
            sum_ = warpgroup_mma_wait(1, (sum_,))
            # Values of a thread that lie side by side in memory, and threads as well.
            sum_ = sum_.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([32, 128])
            mbarrier.wait(sum_empty.index(PART), (step & 1) ^ 1)
            sum_blocks.index(PART).store(sum_)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(sum_full.index(PART), count=1)
            scores = warpgroup_mma_wait(0, (scores,))
    final = True
    if parts > 1:
        # Each part leaves its sums in memory; the last one to come adds those of the others to its own.
        inside = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] * 128
        inside += gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
        piece = partial + (slot * 2 + PART).to(gl.int64) * parts * 16384
        gl.store(piece + part * 16384 + inside, key_total)
        gl.store(piece + part * 16384 + 8192 + inside, value_total)
        gl.thread_barrier()
        ticket = gl.atomic_add(tickets + slot * 2 + PART, 1, sem="acq_rel", scope="gpu")
        final = ticket == parts - 1
        if final:
            for other in range(1, parts):
                more = piece + (part + other) % parts * 16384 + inside
                key_total += gl.load(more, cache_modifier=".cg")
                value_total += gl.load(more + 8192, cache_modifier=".cg")
    if final:
        own = first + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        place = ((key_start + own).to(gl.int64) * key_heads + key_head)[:, None] * 128
        place = place + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
        within = (own < num_keys)[:, None]
        gl.store(key_out + place, (key_total * slope).to(k_block.dtype), mask=within)
        gl.store(value_out + place, value_total.to(v_block.dtype), mask=within)


@jit_for_all("window", "tokens", "blocks")
def _attention_backward(
    q: Value, k: Value, v: Value, grad: Value, lse: Value, delta: Value, sums: Value, key_out: Value, value_out: Value,
    table: Value, scale: Value, cap: Value, slope: Value, window: Value, tokens: Value, blocks: Value, key_heads: Value,
    head_step: Value, key_step: Value, value_step: Value, partial: Value, tickets: Value,
    GROUP: gluon_constexpr, CAUSAL: gluon_constexpr, WINDOW: gluon_constexpr, CAPPED: gluon_constexpr,
    FAST: gluon_constexpr, REGISTERS: gluon_constexpr,
) -> None:  # fmt: skip
    entry = table + 10 * gl.program_id(0)
    start = gl.load(entry)
    length = gl.load(entry + 1)
    key_start = gl.load(entry + 2)
    num_keys = gl.load(entry + 3)
    first = gl.load(entry + 4)
    base = gl.load(entry + 5)
    key_head = gl.load(entry + 6)
    part = gl.load(entry + 7)
    parts = gl.load(entry + 8)
    slot = gl.load(entry + 9)
    members = GROUP // parts
    head = key_head * GROUP + part * members
    begin, edge, whole, stop = queries_of(first, length, num_keys - length, window, CAUSAL, WINDOW, 64, 128)
    # A block that reaches into the next sequence is masked as a whole.
    edge = gl.where(first + 128 > num_keys, stop, edge)
    edge = gl.minimum(gl.maximum(edge, begin), gl.maximum(stop, begin))
    whole = gl.maximum(whole, edge)
    count = gl.maximum(stop - begin + 63, 0) // 64
    k_block = gl.allocate_shared_memory(k.dtype, [1, 128, 128], k.layout)
    v_block = gl.allocate_shared_memory(v.dtype, [1, 128, 128], v.layout)
    q_blocks = gl.allocate_shared_memory(q.dtype, [2, 64, 128], q.layout)
    grad_blocks = gl.allocate_shared_memory(grad.dtype, [2, 64, 128], grad.layout)
    lse_rows = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    delta_rows = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    slope_blocks = gl.allocate_shared_memory(q.dtype, [2, 128, 64], q.layout)
    sum_blocks = gl.allocate_shared_memory(gl.float32, [2, 32, 128], sums.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    grad_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(2):
        # The copy engine and the warp that loads.
        mbarrier.init(q_full.index(i), count=2)
        mbarrier.init(grad_full.index(i), count=1)
        mbarrier.init(sum_full.index(i), count=1)
        mbarrier.init(sum_empty.index(i), count=1)
        mbarrier.init(met.index(i), count=2)
    gl.warp_specialize(
        [
            (_multiply, (
                0, q_blocks, grad_blocks, lse_rows, delta_rows, k_block, v_block, slope_blocks, sum_blocks, ready,
                q_full, grad_full, sum_full, sum_empty, met, key_out, value_out, length,
                key_start, num_keys, first, begin, edge, whole, count, scale, cap, slope, window, key_head, key_heads,
                members, slot, part, parts, partial, tickets, CAUSAL, WINDOW, CAPPED, FAST,
            )),
            (_multiply, (
                1, q_blocks, grad_blocks, lse_rows, delta_rows, k_block, v_block, slope_blocks, sum_blocks, ready,
                q_full, grad_full, sum_full, sum_empty, met, key_out, value_out, length,
                key_start, num_keys, first, begin, edge, whole, count, scale, cap, slope, window, key_head, key_heads,
                members, slot, part, parts, partial, tickets, CAUSAL, WINDOW, CAPPED, FAST,
            )),
            (_load, (
                q, grad, lse, delta, k, v, q_blocks, grad_blocks, lse_rows, delta_rows, k_block, v_block, ready,
                q_full, grad_full, sum_full, start + begin, start + length, key_start + first, count,
                tokens, key_head, head, members, head_step, key_step, value_step,
            )),
            (_add, (
                sums, sum_blocks, sum_full, sum_empty, count, head, members, base + begin // 64, blocks,
            )),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )  # fmt: skip


def run(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: PackedSequences,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, and the sums of outputs times their gradients ``[H, T]``.

    Arguments are as in :func:`megalight.ops.attention.triton_backward.run`, with the output instead of these sums.
    """
    (tokens, heads, _), key_heads, keys = q.shape, k.shape[1], sequences.keys or sequences
    group = heads // key_heads
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    table, split, parts = programs(sequences.lengths, keys.lengths, causal, window, key_heads, group, q.device)
    rows = query_blocks(sequences.lengths, q.device)
    delta, sums, tickets = prepare(out, grad, len(rows), group, 2 * split)
    partial = torch.empty(max(1, split) * 2 * parts, 2, 64, 128, dtype=torch.float32, device=q.device)
    _attention_backward[(len(table),)](
        *(described(q, ROWS), described(k, KEYS), described(v, KEYS), described(grad, ROWS), lse, delta),
        *(Descriptor.from_tensor(sums, [LINES, WIDTH], FLAT), grad_k, grad_v, table, *factors(scale, softcap)),
        *(scale, window or 0, tokens, len(rows), key_heads, q.stride(1), k.stride(1), v.stride(1)), *(partial, tickets),
        **flags(q, k, causal, window, softcap), **BLOCKS,
    )  # fmt: skip
    round_sums(sums, grad_q, rows, scale, group)
    return grad_q, grad_k, grad_v, delta
