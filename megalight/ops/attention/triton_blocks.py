"""What the Triton kernels of attention share: blocks of tokens and of heads, masks, and soft caps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megalight.imports import require
from megalight.ops.jit import Value, constexpr, jit, next_power, tl
from megalight.types import to_device

Descriptor: Any = require("triton.tools.tensor_descriptor", "a Triton kernel").TensorDescriptor

Block: TypeAlias = tuple[int, tuple[int, ...]]
"""How many keys or queries a block sees, and its row of a table."""

LOG2E = math.log2(math.e)

WIDE = 128
"""Features of a head above which blocks are smaller."""
NARROW = 16
"""Least number of values in half types that one instruction of Hopper's products adds up."""


@jit
def tanh(x: Value, FAST: constexpr) -> Any:
    """Return the tangent; ``FAST``: by the instruction of NVIDIA's GPUs."""
    if FAST:
        # One instruction, with an error of 2^-11: less than that of a weight in bfloat16.
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505  # a branch of the compiler
        return 1 - 2 / (tl.exp2(2 * 1.4426950408889634 * x) + 1)


@jit
def visible(places: Value, keys: Value, num_keys: Value, window: Value, CAUSAL: constexpr, WINDOW: constexpr) -> Any:
    """Return which queries see which keys; ``places`` and ``keys`` broadcast to the block."""
    seen = keys < num_keys
    if CAUSAL:
        seen &= places >= keys
    if WINDOW:
        seen &= places - keys <= window
    return seen


@jit
def sequence(table: Value, block: Value) -> Any:
    """Return first token and length of the queries and of the keys of a block's sequence, and its first row."""
    row = table + 5 * block
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@jit
def steps_of(begin: Value, edge: Value, whole: Value, stop: Value, MASKED: constexpr, SIZE: constexpr) -> Any:
    """Return how many blocks of the second of three ranges there are, or of the first and third, which need masks.

    These two share a loop: each loop begins with loads that nothing hides.
    """
    if MASKED:
        return tl.cdiv(edge - begin, SIZE) + tl.cdiv(tl.maximum(stop - whole, 0), SIZE)
    else:  # noqa: RET505  # a branch of the compiler
        return tl.cdiv(whole - edge, SIZE)


@jit
def start_of(index: Value, begin: Value, edge: Value, whole: Value, MASKED: constexpr, SIZE: constexpr) -> Any:
    """Return where a block of these ranges starts."""
    if MASKED:
        before = tl.cdiv(edge - begin, SIZE)
        return tl.where(index < before, begin + index * SIZE, whole + (index - before) * SIZE)
    else:  # noqa: RET505  # a branch of the compiler
        return edge + index * SIZE


@jit
def keys_of(
    first: Value, length: Value, num_keys: Value, window: Value,
    CAUSAL: constexpr, WINDOW: constexpr, ROWS: constexpr, COUNT: constexpr,
) -> Any:  # fmt: skip
    """Return the keys that a block of queries sees as three ranges; all rows see all keys of the second."""
    place = first + num_keys - length
    stop = num_keys
    whole = num_keys // COUNT * COUNT
    if CAUSAL:
        stop = tl.minimum(num_keys, place + ROWS)
        whole = tl.minimum(whole, (place + 1) // COUNT * COUNT)
    begin = 0
    edge = 0
    if WINDOW:
        begin = tl.maximum(place - window, 0) // COUNT * COUNT
        edge = tl.cdiv(tl.maximum(place + ROWS - 1 - window, 0), COUNT) * COUNT
    edge = tl.minimum(tl.maximum(edge, begin), stop)
    return begin, edge, tl.maximum(whole, edge), stop


@jit
def queries_of(
    first: Value, length: Value, shift: Value, window: Value,
    CAUSAL: constexpr, WINDOW: constexpr, ROWS: constexpr, COUNT: constexpr,
) -> Any:  # fmt: skip
    """Return the queries that see a block of keys as three ranges, like :func:`keys_of`; not yet in order if empty."""
    begin = 0
    edge = 0
    stop = length
    whole = length
    if CAUSAL:
        begin = tl.maximum(first - shift, 0) // ROWS * ROWS
        edge = tl.cdiv(tl.maximum(first + COUNT - 1 - shift, 0), ROWS) * ROWS
    if WINDOW:
        stop = tl.minimum(length, tl.maximum(first + COUNT + window - shift, 0))
        whole = tl.minimum(length, tl.maximum(first + window + 1 - shift, 0) // ROWS * ROWS)
    return begin, edge, whole, stop


def describable(x: Tensor) -> bool:
    """Return whether the hardware can load blocks of a view: rows begin at multiples of 16 bytes."""
    bytes_ = [stride * x.element_size() for stride in x.stride()[:-1]]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(size and size % 16 == 0 for size in bytes_)


def padded(size: int) -> int:
    """Return the features of a block for heads of ``size``; a product adds up at least ``NARROW`` of them."""
    return max(NARROW, next_power(size))


def described(x: Tensor, rows: int) -> Any:
    """Return the descriptor of blocks of ``rows`` tokens of one head. Features beyond the head's read as 0."""
    return Descriptor.from_tensor(x, [rows, 1, padded(x.shape[-1])])


def shape_of(narrow: dict[str, Any], wide: dict[str, Any], q: Tensor, v: Tensor) -> dict[str, Any]:
    """Return the sizes of blocks for these heads."""
    features, values = padded(q.shape[-1]), padded(v.shape[-1])
    return {**(wide if max(features, values) > WIDE else narrow), "FEATURES": features, "VALUES": values}


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor of products, and that of capped scores. Scores are in units of log 2."""
    return (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)


def flags(q: Tensor, k: Tensor, causal: bool, window: int | None, softcap: float | None) -> dict[str, Any]:
    """Return the choices that kernels are compiled for."""
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "CAPPED": softcap is not None,
        "FAST": q.device.type == "cuda",
    }


def _sequences(lengths: tuple[int, ...], keys: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Return first token and length of the queries and of the keys of each sequence."""
    start = key_start = 0
    for length, count in zip(lengths, keys, strict=True):
        yield start, length, key_start, count
        start, key_start = start + length, key_start + count


# Cached by lengths, which are on the host: all layers of a pass share their tables.
@lru_cache(maxsize=64)
def query_blocks(
    lengths: tuple[int, ...], keys: tuple[int, ...], rows: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Return the blocks of queries, ``[n, 5]`` int32; those that see most come first.

    A row has first token and length of the queries and of the keys of the block's sequence, and the block's first row
    in it: a program knows all after one load.
    """
    blocks: list[Block] = []
    for start, length, key_start, count in _sequences(lengths, keys):
        for first in range(0, length, rows):
            place = first + count - length
            stop = min(count, place + rows) if causal else count
            seen = stop - (0 if window is None else max(0, place - window))
            blocks.append((seen, (start, length, key_start, count, first)))
    return table_of([row for _, row in _most_first(blocks)], device)


@lru_cache(maxsize=64)
def key_blocks(
    lengths: tuple[int, ...], keys: tuple[int, ...], size: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Return the blocks of keys, as above, with the block's first key."""
    return table_of([row for _, row in listed_keys(lengths, keys, size, causal, window)], device)


def listed_keys(
    lengths: tuple[int, ...], keys: tuple[int, ...], size: int, causal: bool, window: int | None
) -> list[Block]:
    """Return the rows of :func:`key_blocks`, each with how many queries see the block."""
    blocks: list[Block] = []
    for start, length, key_start, count in _sequences(lengths, keys):
        for first in range(0, count, size):
            shift = count - length
            stop = length if window is None else min(length, first + size + window - shift)
            seen = stop - (max(0, first - shift) if causal else 0)
            blocks.append((seen, (start, length, key_start, count, first)))
    return _most_first(blocks)


def _most_first(blocks: list[Block]) -> list[Block]:
    return sorted(blocks, key=lambda block: -block[0])


def table_of(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return rows of equally many numbers as an int32 tensor."""
    # Made in inference mode, it could not be used in a backward pass.
    with torch.inference_mode(False):
        flat = to_device([value for row in rows for value in row], torch.int32, device)
        return flat.view(len(rows), -1)
