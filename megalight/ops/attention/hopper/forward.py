"""The forward pass of attention on Hopper, for heads of 128 features.

A tile is 128 queries of a head, and a program goes over many. One warp loads blocks of keys and values, and queries, as
soon as there is room. Two groups of four warps have 64 queries each, and wait for nothing but their blocks: while one
takes exponentials, the other multiplies. The products of a group with the values of one block run while it takes the
exponentials of the next, also where the next block is the first one of the next tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention.hopper.gluon import (
    constexpr,
    described,
    gl,
    jit,
    jit_for_all,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from megalight.ops.attention.triton_blocks import factors, flags, keys_of, query_blocks, sequence, tanh
from megalight.ops.common import num_sms
from megalight.ops.jit import Value
from megalight.types import PackedSequences

ROWS = 128
BLOCKS: dict[str, Any] = {"KEYS": 128, "STAGES": 2, "REGISTERS": 240, "num_warps": 4}
"""Keys of a step, blocks of them in shared memory, and registers of a thread that multiplies."""


@jit
def _tiles(program: Value, programs: Value, tiles: Value) -> Any:
    """Return how many tiles a program has."""
    turns = tiles // programs
    return turns + gl.where(_tile(turns, program, programs) < tiles, 1, 0)


@jit
def _tile(turn: Value, program: Value, programs: Value) -> Any:
    """Return a program's tile of a turn. Tiles lie in order of their size, and each turn deals them the other way."""
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@jit
def _load(
    q: Value, k: Value, v: Value, q_blocks: Value, k_blocks: Value, v_blocks: Value, q_full: Value, q_empty: Value,
    k_full: Value, k_empty: Value, v_full: Value, v_empty: Value, table: Value, turns: Value, program: Value,
    programs: Value, window: Value, heads: Value, head_step: Value, key_step: Value, value_step: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, KEYS: constexpr, STAGES: constexpr,
) -> None:  # fmt: skip
    """Load the queries, keys and values of all tiles."""
    done = 0
    for turn in range(turns):
        tile = _tile(turn, program, programs)
        head = tile % heads
        start, length, key_start, num_keys, first = sequence(table, tile // heads)
        begin, _edge, _whole, stop = keys_of(first, length, num_keys, window, CAUSAL, WINDOW, 128, KEYS)
        slot = turn % 2
        mbarrier.wait(q_empty.index(slot), ((turn // 2) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 128 * 128 * 2)
        tma.async_copy_global_to_shared(q, [start + first, head * head_step], q_full.index(slot), q_blocks.index(slot))
        row = key_start + begin
        for _step in range(_steps(begin, stop, KEYS)):
            stage = done % STAGES
            phase = ((done // STAGES) & 1) ^ 1
            bar = k_full.index(stage)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(bar, KEYS * 128 * 2)
            tma.async_copy_global_to_shared(k, [row, head // GROUP * key_step], bar, k_blocks.index(stage))
            bar = v_full.index(stage)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(bar, KEYS * 128 * 2)
            tma.async_copy_global_to_shared(v, [row, head // GROUP * value_step], bar, v_blocks.index(stage))
            row += KEYS
            done += 1


@jit
def _steps(begin: Value, stop: Value, KEYS: constexpr) -> Any:
    """Return how many blocks of keys a tile has. At least one: where nothing is seen, all of it is masked."""
    return gl.maximum((stop - begin + KEYS - 1) // KEYS, 1)


@jit
def _seen(places: Value, keys: Value, num_keys: Value, window: Value, CAUSAL: constexpr, WINDOW: constexpr) -> Any:
    """Return which queries see which keys, as :func:`.triton_blocks.visible`, by fewer comparisons.

    A query's place is that of its own key, so none sees keys behind the last one if none sees later keys. What rows
    behind the last query see does not matter.
    """
    if CAUSAL and WINDOW:
        # Without a sign, the distance to a later key is a large one.
        return (places - keys).to(gl.uint32) <= window
    elif CAUSAL:  # noqa: RET505  # a branch of the compiler
        return keys <= places
    elif WINDOW:
        return (keys < num_keys) & (places - keys <= window)
    else:
        return keys < num_keys


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
        seen = _seen(places[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    more = gl.maximum(most, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - more[:, None])
    shrink = gl.exp2(most - more)
    return weights.to(TYPE), shrink, more, sum_ * shrink + gl.sum(weights, 1)


@jit
def _attend(
    PART: constexpr, q_blocks: Value, k_blocks: Value, v_blocks: Value, q_full: Value, q_empty: Value,
    k_full: Value, k_empty: Value, v_full: Value, v_empty: Value, out: Value, lse: Value, sink: Value, table: Value,
    turns: Value, program: Value, programs: Value, scale: Value, cap: Value, window: Value, tokens: Value,
    heads: Value,
    CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, SUNK: constexpr, KEYS: constexpr,
    STAGES: constexpr,
) -> None:  # fmt: skip
    """Attend from one half of the queries of all tiles."""
    scores_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    left_layout: constexpr = gl.DotOperandLayout(0, layout, 2)
    column: constexpr = gl.SliceLayout(1, scores_layout)
    flat: constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    inside = PART * 64 + gl.arange(0, 64, column)
    # Finite, so that the difference to a row that has seen nothing yet is not NaN.
    none = gl.full([64], -1e30, gl.float32, column)
    nothing = gl.zeros([64], gl.float32, column)
    total = gl.zeros([64, 128], gl.float32, layout)
    zero = gl.zeros([64, KEYS], gl.float32, scores_layout)
    tile = _tile(0, program, programs)
    start, length, _at, num_keys, first = sequence(table, tile // heads)
    begin, edge, whole, stop = keys_of(first, length, num_keys, window, CAUSAL, WINDOW, 128, KEYS)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    query = q_blocks.index(0).slice(PART * 64, 64, 0)
    scores = warpgroup_mma(query, k_blocks.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, (scores,))
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    weights, shrink, most, sum_ = _weigh(
        scores, none, nothing, first + inside + num_keys - length, begin, num_keys, window, edge, whole, scale, cap,
        CAUSAL, WINDOW, CAPPED, FAST, KEYS, scores_layout, v_blocks.dtype,
    )  # fmt: skip
    narrow = gl.convert_layout(weights, left_layout)
    mbarrier.wait(v_full.index(0), 0)
    done = 0
    for turn in range(turns):
        slot = turn % 2
        query = q_blocks.index(slot).slice(PART * 64, 64, 0)
        places = first + inside + num_keys - length
        next_tile = _tile(gl.minimum(turn + 1, turns - 1), program, programs)
        next_start, next_length, _next_at, next_keys, next_first = sequence(table, next_tile // heads)
        for step in range(1, _steps(begin, stop, KEYS)):
            before = done % STAGES
            done += 1
            stage = done % STAGES
            phase = (done // STAGES) & 1
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
            # Left to itself, the assembler waits for the product with values before it takes exponentials. So the
            # weights pass through a wait that waits for nothing, and the one for values, a loop, comes between.
            weights, shrink = warpgroup_mma_wait(1, (weights, shrink))
            mbarrier.wait(v_full.index(stage), phase)
            total, weights, shrink = warpgroup_mma_wait(0, (total, weights, shrink))
            gl.thread_barrier()
            mbarrier.arrive(v_empty.index(before), count=1)
            total = total * gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None]
            narrow = gl.convert_layout(weights, left_layout)
        # The same with the first block of the next tile; after the last tile, with whatever is there.
        begin, edge, whole, stop = keys_of(next_first, next_length, next_keys, window, CAUSAL, WINDOW, 128, KEYS)
        more = turn + 1 < turns
        before = done % STAGES
        done += 1
        stage = done % STAGES
        phase = (done // STAGES) & 1
        mbarrier.wait(q_full.index(slot ^ 1), ((turn + 1) // 2) & 1, pred=more)
        mbarrier.wait(k_full.index(stage), phase, pred=more)
        query = q_blocks.index(slot ^ 1).slice(PART * 64, 64, 0)
        scores = warpgroup_mma(query, k_blocks.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        total = warpgroup_mma(narrow, v_blocks.index(before), total, is_async=True)
        scores = warpgroup_mma_wait(1, (scores,))
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.arrive(q_empty.index(slot), count=1)
        places = next_first + inside + next_keys - next_length
        weights, shrink, next_most, next_sum = _weigh(
            scores, none, nothing, places, begin, next_keys, window, edge, whole, scale, cap,
            CAUSAL, WINDOW, CAPPED, FAST, KEYS, scores_layout, v_blocks.dtype,
        )  # fmt: skip
        weights, next_most, next_sum = warpgroup_mma_wait(1, (weights, next_most, next_sum))
        mbarrier.wait(v_full.index(stage), phase, pred=more)
        total, weights = warpgroup_mma_wait(0, (total, weights))
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        head = tile % heads
        factor = 1 / sum_
        if SUNK:
            extra = gl.load(sink + head).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(most, extra)
            shrink = gl.exp2(most - top)
            sum_ = sum_ * shrink + gl.exp2(extra - top)
            factor = shrink / sum_
            most = top
        gl.store(lse + head * tokens + start + first + inside, most + gl.log2(sum_), mask=first + inside < length)
        total = total * gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]
        short = gl.convert_layout(total.to(v_blocks.dtype), flat)
        rows = first + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, flat))
        place = ((start + rows).to(gl.int64) * heads + head)[:, None] * 128
        gl.store(
            out + place + gl.arange(0, 128, gl.SliceLayout(0, flat))[None, :], short, mask=(rows < length)[:, None]
        )
        total = gl.zeros([64, 128], gl.float32, layout)
        narrow = gl.convert_layout(weights, left_layout)
        most, sum_ = next_most, next_sum
        tile = next_tile
        start, length, num_keys, first = next_start, next_length, next_keys, next_first


@jit_for_all("window", "tokens", "tiles")
def _attention_forward(
    q: Value, k: Value, v: Value, out: Value, lse: Value, table: Value, sink: Value, scale: Value, cap: Value,
    window: Value, tokens: Value, tiles: Value, heads: Value, head_step: Value, key_step: Value, value_step: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, SUNK: constexpr,
    KEYS: constexpr, STAGES: constexpr, REGISTERS: constexpr,
) -> None:  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    turns = _tiles(program, programs, tiles)
    q_blocks = gl.allocate_shared_memory(q.dtype, [2, 128, 128], q.layout)
    k_blocks = gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, 128], k.layout)
    v_blocks = gl.allocate_shared_memory(v.dtype, [STAGES, KEYS, 128], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        # Both groups are done with a block.
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_attend, (
                0, q_blocks, k_blocks, v_blocks, q_full, q_empty, k_full, k_empty, v_full, v_empty, out, lse, sink,
                table, turns, program, programs, scale, cap, window, tokens, heads,
                CAUSAL, WINDOW, CAPPED, FAST, SUNK, KEYS, STAGES,
            )),
            (_attend, (
                1, q_blocks, k_blocks, v_blocks, q_full, q_empty, k_full, k_empty, v_full, v_empty, out, lse, sink,
                table, turns, program, programs, scale, cap, window, tokens, heads,
                CAUSAL, WINDOW, CAPPED, FAST, SUNK, KEYS, STAGES,
            )),
            (_load, (
                q, k, v, q_blocks, k_blocks, v_blocks, q_full, q_empty, k_full, k_empty, v_full, v_empty, table, turns,
                program, programs, window, heads, head_step, key_step, value_step,
                GROUP, CAUSAL, WINDOW, KEYS, STAGES,
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
    tiles = heads * len(table)
    _attention_forward[(min(tiles, num_sms(q.device)),)](
        *(described(q, ROWS), described(k, size), described(v, size), out, lse, table, sink),
        *(*factors(scale, softcap), window or 0, tokens, tiles, heads, q.stride(1), k.stride(1), v.stride(1)),
        SUNK=sink is not None, **flags(q, k, causal, window, softcap), **BLOCKS,
    )  # fmt: skip
    return out, lse
