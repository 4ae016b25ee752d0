"""The forward pass of attention on Hopper, for heads of 128 features.

A program has 128 queries. One warp loads blocks of keys and values, as soon as there is room. Two groups of four warps
have 64 queries each, and wait for nothing but their blocks: while one takes exponentials, the other multiplies. The
products of a group with the values of one block run while it takes the exponentials of the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention.blocks import factors, flags, keys_of, query_blocks, sequence, tanh, visible
from megalight.ops.attention.hopper.blocks import described
from megalight.ops.gluon import constexpr, gl, jit, jit_for_all, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from megalight.ops.jit import Value
from megalight.types import PackedSequences

ROWS = 128
BLOCKS: dict[str, Any] = {"KEYS": 128, "STAGES": 2, "REGISTERS": 240, "num_warps": 4}
"""Keys of a step, blocks of them in shared memory, and registers of a thread that multiplies."""


@jit
def _load(
    q: Value, k: Value, v: Value, q_block: Value, k_blocks: Value, v_blocks: Value, ready: Value,
    k_full: Value, k_empty: Value, v_full: Value, v_empty: Value,
    query_row: Value, key_row: Value, steps: Value, query_place: Value, key_place: Value, value_place: Value,
    KEYS: constexpr, STAGES: constexpr,
) -> None:  # fmt: skip
    """Load the queries, and the keys and values of all steps."""
    mbarrier.expect(ready, 128 * 128 * 2)
    tma.async_copy_global_to_shared(q, [query_row, query_place], ready, q_block)
    for step in range(steps):
        stage = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        row = key_row + step * KEYS
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), KEYS * 128 * 2)
        tma.async_copy_global_to_shared(k, [row, key_place], k_full.index(stage), k_blocks.index(stage))
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), KEYS * 128 * 2)
        tma.async_copy_global_to_shared(v, [row, value_place], v_full.index(stage), v_blocks.index(stage))


@jit
def _weigh(
    scores: Value, most: Value, sum_: Value, places: Value, start: Value, num_keys: Value, window: Value, edge: Value,
    whole: Value, scale: Value, cap: Value,
    CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, KEYS: constexpr, LAYOUT: constexpr,
    TYPE: constexpr,
) -> Any:  # fmt: skip
    """Return the weights of a block, the factor of what was before, and the running maximum and sum (log 2)."""
    if CAPPED:
        scores = tanh(scores * scale, FAST) * cap
        scale = 1.0
    if (start < edge) | (start + KEYS > whole):
        keys = start + gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        seen = visible(places[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    more = gl.maximum(most, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - more[:, None])
    shrink = gl.exp2(most - more)
    return weights.to(TYPE), shrink, more, sum_ * shrink + gl.sum(weights, 1)


@jit
def _attend(
    PART: constexpr, q_block: Value, k_blocks: Value, v_blocks: Value, ready: Value,
    k_full: Value, k_empty: Value, v_full: Value, v_empty: Value, out: Value, lse: Value, sink: Value,
    start: Value, length: Value, num_keys: Value, first: Value, begin: Value, edge: Value, whole: Value, steps: Value,
    scale: Value, cap: Value, window: Value, tokens: Value, head: Value, heads: Value,
    CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, SUNK: constexpr, KEYS: constexpr,
    STAGES: constexpr,
) -> None:  # fmt: skip
    """Attend from one half of the queries."""
    scores_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    left_layout: constexpr = gl.DotOperandLayout(0, layout, 2)
    column: constexpr = gl.SliceLayout(1, scores_layout)
    rows = first + PART * 64 + gl.arange(0, 64, column)
    places = rows + num_keys - length
    # Finite, so that the difference to a row that has seen nothing yet is not NaN.
    most = gl.full([64], -1e30, gl.float32, column)
    sum_ = gl.zeros([64], gl.float32, column)
    total = gl.zeros([64, 128], gl.float32, layout)
    zero = gl.zeros([64, KEYS], gl.float32, scores_layout)
    query = q_block.slice(PART * 64, 64, 0)
    mbarrier.wait(ready, 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(query, k_blocks.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, (scores,))
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    weights, shrink, most, sum_ = _weigh(
        scores, most, sum_, places, begin, num_keys, window, edge, whole, scale, cap,
        CAUSAL, WINDOW, CAPPED, FAST, KEYS, scores_layout, v_blocks.dtype,
    )  # fmt: skip
    narrow = gl.convert_layout(weights, left_layout)
    mbarrier.wait(v_full.index(0), 0)
    for step in range(1, steps):
        stage = step % STAGES
        before = (step - 1) % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        scores = warpgroup_mma(query, k_blocks.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        total = warpgroup_mma(narrow, v_blocks.index(before), total, is_async=True)
        scores = warpgroup_mma_wait(1, (scores,))
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, shrink, most, sum_ = _weigh(
            scores, most, sum_, places, begin + step * KEYS, num_keys, window, edge, whole, scale, cap,
            CAUSAL, WINDOW, CAPPED, FAST, KEYS, scores_layout, v_blocks.dtype,
        )  # fmt: skip
        # Left to itself, the assembler waits for the product with values before it takes exponentials. So the weights
        # pass through a wait that waits for nothing, and the one for values, a loop, comes between.
        weights, shrink = warpgroup_mma_wait(1, (weights, shrink))
        mbarrier.wait(v_full.index(stage), phase)
        total, weights, shrink = warpgroup_mma_wait(0, (total, weights, shrink))
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None]
        narrow = gl.convert_layout(weights, left_layout)
    total = warpgroup_mma(narrow, v_blocks.index((steps - 1) % STAGES), total, is_async=True)
    total = warpgroup_mma_wait(0, (total,))
    factor = 1 / sum_
    if SUNK:
        extra = gl.load(sink + head).to(gl.float32) * 1.4426950408889634
        more = gl.maximum(most, extra)
        shrink = gl.exp2(most - more)
        sum_ = sum_ * shrink + gl.exp2(extra - more)
        factor = shrink / sum_
        most = more
    gl.store(lse + head * tokens + start + rows, most + gl.log2(sum_), mask=rows < length)
    total = total * gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]
    flat: constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    narrow = gl.convert_layout(total.to(v_blocks.dtype), flat)
    rows = first + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, flat))
    place = ((start + rows).to(gl.int64) * heads + head)[:, None] * 128
    gl.store(out + place + gl.arange(0, 128, gl.SliceLayout(0, flat))[None, :], narrow, mask=(rows < length)[:, None])


@jit_for_all("window", "tokens")
def _forward(
    q: Value, k: Value, v: Value, out: Value, lse: Value, table: Value, sink: Value, scale: Value, cap: Value,
    window: Value, tokens: Value, heads: Value, head_step: Value, key_step: Value, value_step: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, SUNK: constexpr,
    KEYS: constexpr, STAGES: constexpr, REGISTERS: constexpr,
) -> None:  # fmt: skip
    head = gl.program_id(0)
    key_head = head // GROUP
    start, length, key_start, num_keys, first = sequence(table, gl.program_id(1))
    begin, edge, whole, stop = keys_of(first, length, num_keys, window, CAUSAL, WINDOW, 128, KEYS)
    # At least one: where nothing is seen, all of it is masked.
    steps = gl.maximum((stop - begin + KEYS - 1) // KEYS, 1)
    q_block = gl.allocate_shared_memory(q.dtype, [128, 128], q.layout)
    k_blocks = gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, 128], k.layout)
    v_blocks = gl.allocate_shared_memory(v.dtype, [STAGES, KEYS, 128], v.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        # Both groups are done with a block.
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_attend, (
                0, q_block, k_blocks, v_blocks, ready, k_full, k_empty, v_full, v_empty, out, lse, sink,
                start, length, num_keys, first, begin, edge, whole, steps, scale, cap, window, tokens, head, heads,
                CAUSAL, WINDOW, CAPPED, FAST, SUNK, KEYS, STAGES,
            )),
            (_attend, (
                1, q_block, k_blocks, v_blocks, ready, k_full, k_empty, v_full, v_empty, out, lse, sink,
                start, length, num_keys, first, begin, edge, whole, steps, scale, cap, window, tokens, head, heads,
                CAUSAL, WINDOW, CAPPED, FAST, SUNK, KEYS, STAGES,
            )),
            (_load, (
                q, k, v, q_block, k_blocks, v_blocks, ready, k_full, k_empty, v_full, v_empty,
                start + first, key_start + begin, steps, head * head_step, key_head * key_step, key_head * value_step,
                KEYS, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    sequences: PackedSequences,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each row ``[H, T]`` in units of log 2."""
    (tokens, heads, _), keys = q.shape, sequences.keys or sequences
    out = q.new_empty(q.shape)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    size = BLOCKS["KEYS"]
    table = query_blocks(sequences.lengths, keys.lengths, ROWS, causal, window, q.device)
    _forward[(heads, len(table))](
        *(described(q, ROWS), described(k, size), described(v, size), out, lse, table, sink),
        *(*factors(scale, softcap), window or 0, tokens, heads, q.stride(1), k.stride(1), v.stride(1)),
        SUNK=sink is not None,
        **flags(q, k, causal, window, softcap),
        **BLOCKS,
    )
    return out, lse
