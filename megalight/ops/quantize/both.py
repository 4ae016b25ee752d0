"""A matrix and its transpose cast to 8 bits with one scale: each element is read once and rounded once.

Four tokens' codes of a feature are one word: words, not bytes, change places in shared memory on their way to the
transpose, which is written in words.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize.formats import DTYPES, LARGEST
from megalight.ops.quantize.reference import TINY
from megalight.ops.quantize.types import Quantized, Scheme

TILE = {"TOKENS": 128, "FEATURES": 64, "ACROSS_FIRST": False, "num_warps": 4}
"""Shape of what a program casts, and whether programs follow each other along features or along tokens."""


@jit
def factor_of(amax: Value, LARGEST: constexpr, SMALLEST: constexpr, POWER: constexpr) -> Value:
    """What values of magnitude up to ``amax`` are multiplied by to fill a format."""
    factor = tl.div_rn(LARGEST, tl.maximum(amax, SMALLEST))
    if POWER:
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return factor


@jit
def clamped(x: Value, LARGEST: constexpr) -> Value:
    """``x`` between plus and minus ``LARGEST``; NaN stays."""
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@jit
def _load(x: Value, t: Value, f: Value, tokens: Value, features: Value, x_stride: Value) -> Value:
    """Features ``f`` of tokens ``t``; zeros beyond the edges."""
    inside = (t < tokens)[:, None] & (f < features)[None, :]
    return tl.load(x + t.to(tl.int64)[:, None] * x_stride + f[None, :], mask=inside, other=0.0)


@jit
def _both(
    x: Value,
    codes: Value,
    words: Value,
    scale: Value,
    amax: Value,
    parts: Value,
    tokens: Value,
    features: Value,
    words_per_feature: Value,
    x_stride: Value,
    LARGEST: constexpr,
    SMALLEST: constexpr,
    POWER: constexpr,
    TELL: constexpr,
    TOKENS: constexpr,
    FEATURES: constexpr,
    ACROSS_FIRST: constexpr,
) -> None:
    if ACROSS_FIRST:
        down, across = tl.program_id(1), tl.program_id(0)
    else:
        down, across = tl.program_id(0), tl.program_id(1)
    four = down * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    f = across * FEATURES + tl.arange(0, FEATURES)
    # all loads come before the first store, for which later ones would wait
    tiles = (
        _load(x, 4 * four, f, tokens, features, x_stride),
        _load(x, 4 * four + 1, f, tokens, features, x_stride),
        _load(x, 4 * four + 2, f, tokens, features, x_stride),
        _load(x, 4 * four + 3, f, tokens, features, x_stride),
    )
    factor = factor_of(tl.load(amax), LARGEST, SMALLEST, POWER)
    tl.store(scale, tl.div_rn(1.0, factor), mask=(down == 0) & (across == 0))
    word = tl.zeros((TOKENS // 4, FEATURES), tl.uint32)
    if TELL:
        sizes = tl.zeros((TOKENS // 4, FEATURES), tl.float32)
    for k in tl.static_range(4):
        t = 4 * four + k
        inside = (t < tokens)[:, None] & (f < features)[None, :]
        tile = tiles[k].to(tl.float32)
        if TELL:
            sizes = tl.maximum(sizes, tl.abs(tile))
        code = clamped(tile * factor, LARGEST).to(codes.dtype.element_ty)
        tl.store(codes + t.to(tl.int64)[:, None] * features + f[None, :], code, mask=inside)
        word |= code.to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * k)
    if TELL:
        tl.store(parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(tl.max(sizes, 1), 0))
    where = words + f.to(tl.int64)[:, None] * words_per_feature + four[None, :]
    tl.store(where, tl.trans(word), mask=(f < features)[:, None] & (four < words_per_feature)[None, :])


def cast_both(x: Tensor, scheme: Scheme, amax: Tensor | None, tell: bool) -> tuple[Quantized, Quantized, Tensor | None]:
    """``x [T, f]``, features side by side, and its transpose ``[f, T padded]``.

    Args:
        amax: the magnitude to allow for, 0-dim; None where ``x`` is empty.
        tell: return the largest magnitudes of parts of ``x``, too.
    """
    tokens, features = x.shape
    padded = tokens + -tokens % scheme.multiple
    codes = torch.empty(tokens, features, dtype=DTYPES[scheme.format], device=x.device)
    transposed = torch.empty(features, padded, dtype=codes.dtype, device=x.device)
    scale = torch.empty(1, 1, device=x.device)
    grid = cdiv(padded, TILE["TOKENS"]), cdiv(features, TILE["FEATURES"])
    parts = torch.empty(grid[0] * grid[1], device=x.device) if tell else None
    if x.numel():
        _both[grid[::-1] if TILE["ACROSS_FIRST"] else grid](
            x,
            codes,
            transposed.view(torch.int32),
            scale,
            amax,
            parts,
            tokens,
            features,
            padded // 4,
            x.stride(0),
            LARGEST=LARGEST[scheme.format],
            SMALLEST=TINY,
            POWER=scheme.scale == "power",
            TELL=tell,
            **TILE,
        )
    whole = Quantized(codes, scale, scheme)
    return whole, replace(whole, data=transposed), parts
