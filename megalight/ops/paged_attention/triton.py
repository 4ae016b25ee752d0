"""Attention through a block table in Triton: keys of a decode step are split over programs, and the parts combined.

A program takes rows of queries: pairs of a query and one of the query heads that share a key head, so that a block of
keys and values is read once for all of them. A decode step has few rows, so several programs share the keys of a
sequence; each writes its part of the output and its log-sum-exp, and a second kernel combines them (Flash-Decoding).
How keys are split follows from the lengths on the device: launches depend on bounds alone, and can be recorded. A long
sequence beside short ones gets more parts than they do, so that no program works long after the others have ended.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention.batch_invariant import PagedAttentionOptions
from megalight.ops.common import last_contiguous, num_sms
from megalight.ops.jit import (
    LOG2E,
    OVERLAP,
    Value,
    cdiv,
    constexpr,
    jit,
    next_power,
    start_dependents,
    tl,
    triton,
)
from megalight.types import Pages

FEW = 8
"""Queries of a sequence up to which keys are split."""
MOST = 64
"""Parts into which the keys of a sequence are split at most."""
PARTS_PER_SM = 4
"""Parts of all sequences together, for each SM: as many programs as run there at once. With fewer the longest decides
how long all take."""
BALANCED = 3
"""Programs of unsplit sequences for each SM, from which on a second kernel takes longer than longer sequences do."""
LENGTHS: Any = tl.constexpr(1024)
"""Lengths that a program adds up; the first of more sequences stand for all."""
LONG = 4096
"""Rows of a sequence from which on blocks are large."""


@jit
def _half(x: Value, like: Value, HARDWARE: constexpr) -> Value:
    """Return e4m3 values in the dtype of ``like``. ``HARDWARE``: nothing is interpreted.

    Assembly that is not pure stays where it is: before values go to shared memory, where latents are read by both
    products. Triton moves its own conversion, and pure assembly, to where each product reads values. They lie there as
    bytes then, and a product that reads them transposed loads them one by one.
    """
    if HARDWARE and like.dtype == tl.bfloat16:
        # Bits are moved to where sign, exponent and mantissa are, and multiplied by 2 ** 120, as the biases differ.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, lower, higher;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.u32 lower, low, 4;
            shr.u32 higher, high, 4;
            and.b32 lower, lower, 0x07f007f0;
            and.b32 higher, higher, 0x07f007f0;
            lop3.b32 low, low, 0x80008000, lower, 0xea;
            lop3.b32 high, high, 0x80008000, higher, 0xea;
            mov.b32 lower, 0x7b807b80;
            mov.b32 higher, 0x80008000;
            fma.rn.bf16x2 $0, low, lower, higher;
            fma.rn.bf16x2 $1, high, lower, higher;
            }""",
            "=r,=r,r",
            [x.to(tl.int8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    elif HARDWARE and like.dtype == tl.float16:  # noqa: RET505  # branches of the compiler
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [x.to(tl.int8, bitcast=True)],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        return x.to(like.dtype)


# Numbers and addresses that differ from step to step: a kernel compiled for each kind of them would stop a run for
# half a second.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["first", "count", "wanted", "table_row"],
    do_not_specialize_on_alignment=["table", "lengths", "cu_queries"],
)
def _attend(
    q: Value, k: Value, v: Value, table: Value, lengths: Value, cu_queries: Value, out: Value, sums: Value, sink: Value,
    k_scale: Value, v_scale: Value, rotary: Value, parts: Value, scale: Value, softcap: Value, first: Value,
    count: Value, wanted: Value, q_token: Value, q_head: Value, k_row: Value, v_row: Value, table_row: Value,
    heads: Value,
    GROUP: constexpr, DIM: constexpr, DIM_BLOCK: constexpr, VALUE: constexpr, VALUE_BLOCK: constexpr, TAIL: constexpr,
    TAIL_BLOCK: constexpr, PAGE: constexpr, ROWS: constexpr, KEYS: constexpr, SPLITS: constexpr, CAUSAL: constexpr,
    WINDOW: constexpr, CHUNK: constexpr, CAPPED: constexpr, SINK: constexpr, SHARED: constexpr, QUANTIZED: constexpr,
    APART: constexpr, HARDWARE: constexpr, PRECISION: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Attend to one part of the keys with one block of rows.

    ``DIM`` features of a key are read at once; with ``SHARED`` they are the value, and ``TAIL`` more follow, which
    ``rotary`` has if they lie ``APART``. ``out`` is
    ``[T, H, VALUE]``. The keys of all ``count`` sequences from ``first`` on are split into about ``wanted`` parts. A
    sequence with several writes ``parts [T, H, SPLITS, VALUE]`` in float32, and their log-sum-exps to ``sums [T, H,
    SPLITS]``: minus infinity for a part that it has not. With one part it writes ``out``, and infinity.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    pair = tl.program_id(2)
    # First parts come first: the others may have nothing to do.
    sequence = first + pair % count
    part = pair // count
    begin = tl.load(cu_queries + sequence)
    queries = tl.load(cu_queries + sequence + 1) - begin
    length = tl.load(lengths + sequence)
    if SPLITS > 1:
        other = tl.arange(0, LENGTHS)
        each = tl.load(lengths + first + other, mask=other < count, other=0)
        if WINDOW >= 0:
            each = tl.minimum(each, WINDOW + 1)
        if CHUNK > 0:
            each = tl.minimum(each, CHUNK)
        usual = tl.maximum(tl.cdiv(tl.sum(each, 0), wanted), KEYS)
    # Lengths are read before the wait: the kernel before this one makes queries, and stores keys and values.
    start_dependents(PDL)
    top = block * ROWS
    if top < queries * GROUP:
        row = top + tl.arange(0, ROWS)
        query = row // GROUP
        valid = query < queries
        head = kv_head * GROUP + row % GROUP
        token = (begin + query).to(tl.int64)
        place = length - queries + query
        feature = tl.arange(0, DIM_BLOCK)
        source = q + token * q_token + head * q_head
        held = tl.load(source[:, None] + feature[None, :], mask=valid[:, None] & (feature < DIM)[None, :], other=0.0)
        if TAIL > 0:
            more = tl.arange(0, TAIL_BLOCK)
            inside = valid[:, None] & (more < TAIL)[None, :]
            tail = tl.load(source[:, None] + DIM + more[None, :], mask=inside, other=0.0)
        # the keys that some row sees
        lowest = length - queries + top // GROUP
        low = 0
        if WINDOW >= 0:
            low = tl.maximum(0, lowest - WINDOW)
        if CHUNK > 0:
            low = tl.maximum(low, lowest // CHUNK * CHUNK)
        high = length
        if CAUSAL:
            high = tl.minimum(length, length - queries + (top + ROWS - 1) // GROUP + 1)
        # Blocks before these may have been given to others, or never written: 0 times NaN is NaN.
        bottom = low
        low = low // KEYS * KEYS
        if SPLITS > 1:
            span = tl.maximum(high - low, 1)
            splits = tl.minimum(tl.maximum((2 * span + usual) // (2 * usual), 1), SPLITS)
            share = tl.cdiv(tl.cdiv(span, splits), KEYS) * KEYS
            several = share < span
            low += part * share
            high = tl.minimum(high, low + share)

        largest = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, VALUE_BLOCK), tl.float32)
        value_feature = tl.arange(0, VALUE_BLOCK)
        offset = tl.arange(0, KEYS)
        blocks = table + sequence.to(tl.int64) * table_row
        for start in range(low, high, KEYS):
            at = start + offset
            present = (at >= bottom) & (at < high)
            number = tl.load(blocks + at // PAGE, mask=present, other=0)
            rows = number.to(tl.int64) * PAGE + at % PAGE
            keys = k + rows * k_row + kv_head * (DIM if APART else DIM + TAIL)
            tails = rotary + (rows * tl.num_programs(1) + kv_head) * TAIL if APART else keys + DIM
            loaded = tl.load(
                keys[:, None] + feature[None, :], mask=present[:, None] & (feature < DIM)[None, :], other=0.0
            )
            if QUANTIZED:
                loaded = _half(loaded, held, HARDWARE)
            scores = tl.dot(held, tl.trans(loaded), input_precision=PRECISION)
            if QUANTIZED:
                scale_at = rows * tl.num_programs(1) + kv_head
                key_scale = tl.load(k_scale + scale_at, mask=present, other=0.0)
                scores *= key_scale[None, :]
            if TAIL > 0:
                turned = tl.load(
                    tails[:, None] + more[None, :], mask=present[:, None] & (more < TAIL)[None, :], other=0.0
                )
                scores += tl.dot(tail, tl.trans(turned), input_precision=PRECISION)
            scores *= scale
            if CAPPED:
                # tanh by a power of 2, which stays finite for any score
                small = tl.exp2(tl.abs(scores / softcap) * (-2 * LOG2E))
                tanh = (1 - small) / (1 + small)
                scores = softcap * tl.where(scores < 0, -tanh, tanh)
            seen = present[None, :]
            if CAUSAL:
                seen = seen & (at[None, :] <= place[:, None])
            if WINDOW >= 0:
                seen = seen & (at[None, :] >= place[:, None] - WINDOW)
            if CHUNK > 0:
                seen = seen & (at[None, :] // CHUNK == place[:, None] // CHUNK)
            scores = tl.where(seen, scores * LOG2E, -float("inf"))
            higher = tl.maximum(largest, tl.max(scores, 1))
            # a row that sees nothing yet: infinity minus infinity would be NaN
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            weights = tl.exp2(scores - shift[:, None])
            shrink = tl.exp2(largest - shift)
            total = total * shrink + tl.sum(weights, 1)
            if SHARED:
                values = loaded
            else:
                values = tl.load(
                    (v + rows * v_row + kv_head * VALUE)[:, None] + value_feature[None, :],
                    mask=present[:, None] & (value_feature < VALUE)[None, :],
                    other=0.0,
                )
                if QUANTIZED:
                    values = _half(values, held, HARDWARE)
            mixed = mixed * shrink[:, None]
            if QUANTIZED:
                value_scale = key_scale if SHARED else tl.load(v_scale + scale_at, mask=present, other=0.0)
                weights *= value_scale[None, :]
            mixed += tl.dot(weights.to(held.dtype), values, input_precision=PRECISION)
            largest = higher
        # a part without keys: its output is 0, and its log-sum-exp minus infinity
        total = tl.where(total == 0, 1.0, total)
        spot = token * heads + head
        inside = valid[:, None] & (value_feature < VALUE)[None, :]
        alone = part == 0
        if SPLITS > 1:
            alone = alone & (several == 0)
            own = spot * SPLITS + part
            result = tl.where(alone, float("inf"), largest + tl.log2(total))
            tl.store(sums + own, result, mask=valid)
            if several:
                target = parts + own[:, None] * VALUE + value_feature[None, :]
                tl.store(target, mixed / total[:, None], mask=inside & (low < high))
        if alone:
            if SINK:
                extra = tl.load(sink + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
                higher = tl.maximum(largest, extra)
                shrink = tl.exp2(largest - higher)
                total = total * shrink + tl.exp2(extra - higher)
                mixed = mixed * shrink[:, None]
            target = out + spot[:, None] * VALUE + value_feature[None, :]
            tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@jit
def _combine(
    parts: Value, sums: Value, sink: Value, out: Value, heads: Value,
    VALUE: constexpr, VALUE_BLOCK: constexpr, SPLITS: constexpr, SINK: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Combine the parts of one head of one token by their log-sum-exps, which are powers of 2."""
    start_dependents(PDL)
    spot = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    feature = tl.arange(0, VALUE_BLOCK)
    inside = feature < VALUE
    each = tl.load(sums + spot * SPLITS + part)
    largest = tl.max(each, 0)
    if largest < float("inf"):
        rows = parts + (spot * SPLITS + part)[:, None] * VALUE + feature[None, :]
        values = tl.load(rows, mask=(each > -float("inf"))[:, None] & inside[None, :], other=0.0)
        if SINK:
            extra = tl.load(sink + spot % heads).to(tl.float32) * LOG2E
            largest = tl.maximum(largest, extra)
        # Padding of a recorded pass sees nothing, and gets zeros: infinity minus infinity would be NaN.
        weights = tl.exp2(each - tl.maximum(largest, -1e30))
        total = tl.sum(weights, 0)
        if SINK:
            total += tl.exp2(extra - largest)
        mixed = tl.sum(values * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
        tl.store(out + spot * VALUE + feature, mixed.to(out.dtype.element_ty), mask=inside)


def splits_of(programs: int, wanted: float, sms: int) -> int:
    """Return into how many parts keys may be split: with them ``programs`` are at least as many as wanted.

    From as many on as are wanted up to :data:`BALANCED` times the number of SMs, long sequences are split.
    """
    # Powers of 4: each number is a kernel of its own, whose compilation would stop a run for seconds.
    fewest = 1 if programs >= BALANCED * sms else 4
    return next((parts for parts in (fewest, 16) if wanted <= programs * parts), MOST)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Pages,
    options: PagedAttentionOptions,
    fixed: bool = False,
) -> Tensor:
    """See :func:`megalight.ops.paged_attention.paged_attention`.

    ``fixed``: blocks do not depend on the batch, and keys are not split (:mod:`megalight.ops.batch_invariant`).
    """
    q = last_contiguous(q)
    out = torch.empty(*q.shape[:2], v_pool.shape[-1], dtype=q.dtype, device=q.device)
    lengths = pages.query_lengths
    # Sequences with few queries come first, and are launched apart: their keys are split.
    few = next((place for place, count in enumerate(lengths) if count > FEW), len(lengths))
    if few:
        _launch(q, k_pool, v_pool, pages, out, 0, few, max(lengths[:few]), options, fixed)
    if few < len(lengths):
        _launch(q, k_pool, v_pool, pages, out, few, len(lengths) - few, max(lengths[few:]), options, fixed)
    return out


def _launch(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Pages,
    out: Tensor,
    first: int,
    count: int,
    queries: int,
    options: PagedAttentionOptions,
    fixed: bool,
) -> None:
    """Attend with the queries of ``count`` sequences, which have at most ``queries`` each."""
    causal, scale, window, chunk, softcap, sink, scales, rotary_pool = options
    (tokens, heads, size), kv_heads, value_size = q.shape, k_pool.shape[1], v_pool.shape[-1]
    group, shared = heads // kv_heads, v_pool.data_ptr() == k_pool.data_ptr()
    # Those of few long prompts, if all passes are to have the same.
    eight = scales is not None
    rows, keys, warps, stages = _blocks(LONG if fixed else queries * group, size, value_size, shared, eight)
    if fixed and shared and q.dtype == torch.float32:
        rows, keys, stages = 16, 16, 1  # latents of four bytes: more would not fit into shared memory
    blocks = cdiv(queries * group, rows)
    # Blocks of many latent rows fill the shared memory of an SM; two others run there at once, and more wait.
    sms, heavy = num_sms(q.device), shared and rows == 64
    programs, per_sequence = blocks * kv_heads * count, blocks * kv_heads
    splits = splits_of(programs, sms * (0.9 if heavy else 1.9), sms) if queries <= FEW and not fixed else 1
    wanted = sms * (1 if heavy else 2 if shared else PARTS_PER_SM) / per_sequence
    parts = sums = out
    if splits > 1:
        # Tokens of other sequences are left out of the parts: they come after these.
        tokens = min(tokens, sum(pages.query_lengths[:count]))
        parts = torch.empty(tokens, heads, splits, value_size, dtype=torch.float32, device=q.device)
        sums = torch.empty(tokens, heads, splits, dtype=torch.float32, device=q.device)
    pdl = OVERLAP.on
    read, tail = (value_size, size - value_size) if shared else (size, 0)
    _attend[(blocks, kv_heads, count * splits)](
        *(q, k_pool, v_pool, pages.block_table, pages.lengths, pages.cu_queries, out, sums, sink),
        *(*(scales or (None, None)), rotary_pool, parts),
        *(1 / math.sqrt(size) if scale is None else scale, softcap or 0.0, first, count),
        max(1, int(wanted * min(1, LENGTHS.value / count))),
        *(*q.stride()[:2], k_pool.stride(0), v_pool.stride(0), pages.block_table.stride(0), heads),
        GROUP=group, DIM=read, DIM_BLOCK=max(16, next_power(read)), VALUE=value_size,
        VALUE_BLOCK=max(16, next_power(value_size)), TAIL=tail, TAIL_BLOCK=max(16, next_power(tail)),
        PAGE=pages.page_size, ROWS=rows, KEYS=keys, SPLITS=splits, CAUSAL=causal,
        WINDOW=-1 if window is None else window, CHUNK=chunk or 0, CAPPED=softcap is not None, SINK=sink is not None,
        SHARED=shared, QUANTIZED=eight, APART=rotary_pool is not None, HARDWARE=q.is_cuda,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PDL=pdl, launch_pdl=pdl, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _combine[(tokens * heads,)](
            *(parts, sums, sink, out, heads),
            VALUE=value_size, VALUE_BLOCK=next_power(value_size), SPLITS=splits, SINK=sink is not None, PDL=pdl,
            launch_pdl=pdl, num_warps=4,
        )  # fmt: skip


def _blocks(rows: int, size: int, value_size: int, shared: bool, eight: bool) -> tuple[int, int, int, int]:
    """Return rows and keys of a block, warps and stages."""
    if shared and eight:
        # The copy of a block begins two blocks before it is needed, and that of its numbers two before that.
        return (16, 32, 4, 5) if rows <= 16 else (64, 64, 8, 3)
    if shared:
        return (16, 32, 4, 2) if rows <= 16 else (32, 32, 4, 2) if rows <= 32 else (64, 64, 8, 2)
    wide = max(size, value_size) > 128
    if rows <= 16:
        # Four programs share an SM: some read while others multiply. From 5 stages on, one does both, and three do.
        return 16, 32 if wide else 64, 4, 4
    # Fewer rows give more programs, where queries are few.
    return (64, 32, 4, 2) if wide else (64 if rows <= LONG else 128, 64, 4, 3)
