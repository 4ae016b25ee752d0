"""The convolution in tiles of tokens and channels: one kernel forward, one backward.

Taps are few, so a tile reads its neighbours' rows again; they are in the cache. The backward computes what goes into
SiLU again, for its own tokens and for the later ones that read them: nothing but the input is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.common import apply, once_differentiable
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl

TILE = 64
"""Channels of a program at most."""
TOKENS = 16
"""Tokens that a program computes at once."""
STRIP = 32
"""Tiles of tokens, one after another, of a program of the backward, which writes its weight gradients once."""


@jit
def _rows(pointer: Value, stride: Value, token: Value, tokens: Value, channel: Value, channels: Value) -> Value:
    """Load ``[tokens, channels]`` in float32; 0 outside."""
    inside = ((token >= 0) & (token < tokens))[:, None] & (channel < channels)[None, :]
    return tl.load(pointer + token.to(tl.int64)[:, None] * stride + channel[None, :], mask=inside, other=0.0).to(
        tl.float32
    )


@jit
def _filtered(
    x: Value,
    weight: Value,
    bias: Value,
    stride: Value,
    token: Value,
    tokens: Value,
    place: Value,
    channel: Value,
    channels: Value,
    TAPS: constexpr,
    BIAS: constexpr,
    TOKENS: constexpr,
    TILE: constexpr,
) -> Value:
    """Return the sums over the taps for tokens at ``place`` in their sequences, ``[TOKENS, TILE]``."""
    out = tl.zeros((TOKENS, TILE), tl.float32)
    if BIAS:
        out += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight + channel * TAPS + (TAPS - 1 - tap), mask=channel < channels, other=0.0)
        # The packed tokens are one row: those of an earlier sequence do not count.
        source = tl.where(place >= tap, token - tap, -1)
        out += factor.to(tl.float32)[None, :] * _rows(x, stride, source, tokens, channel, channels)
    return out


@jit
def _forward(
    x: Value,
    weight: Value,
    bias: Value,
    positions: Value,
    y: Value,
    tokens: Value,
    channels: Value,
    stride: Value,
    TAPS: constexpr,
    BIAS: constexpr,
    SILU: constexpr,
    TOKENS: constexpr,
    TILE: constexpr,
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = tl.load(positions + token, mask=token < tokens, other=0)
    out = _filtered(x, weight, bias, stride, token, tokens, place, channel, channels, TAPS, BIAS, TOKENS, TILE)
    if SILU:
        out = out * tl.sigmoid(out)
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    target = y + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(target, out.to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    grad_y: Value,
    x: Value,
    weight: Value,
    bias: Value,
    positions: Value,
    grad_x: Value,
    grad_weight: Value,
    grad_bias: Value,
    tokens: Value,
    channels: Value,
    stride: Value,
    TAPS: constexpr,
    BIAS: constexpr,
    SILU: constexpr,
    TOKENS: constexpr,
    TILE: constexpr,
    STRIP: constexpr,
    COLUMNS: constexpr,
) -> None:
    """Write the gradient of some rows, and each strip's share of those of weight and bias."""
    strip = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, COLUMNS)
    sums = tl.zeros((TILE, COLUMNS), tl.float32)
    whole = tl.zeros((TILE,), tl.float32)
    for step in range(STRIP):
        token = (strip * STRIP + step) * TOKENS + tl.arange(0, TOKENS)
        grad = tl.zeros((TOKENS, TILE), tl.float32)
        for tap in tl.static_range(TAPS):
            # the token that reads this one with this tap
            reader = token + tap
            place = tl.load(positions + reader, mask=reader < tokens, other=-1)
            reads = tl.where(place >= tap, reader, -1)
            given = _rows(grad_y, channels, reads, tokens, channel, channels)
            if SILU:
                before = _filtered(
                    x, weight, bias, stride, reads, tokens, place, channel, channels, TAPS, BIAS, TOKENS, TILE
                )
                share = tl.sigmoid(before)
                given *= share * (1 + before * (1 - share))
            factor = tl.load(weight + channel * TAPS + (TAPS - 1 - tap), mask=channel < channels, other=0.0)
            grad += factor.to(tl.float32)[None, :] * given
            # A pair of tokens belongs to the one that is read: each pair is counted once.
            own = _rows(x, stride, token, tokens, channel, channels)
            sums += tl.where(column == TAPS - 1 - tap, tl.sum(given * own, 0)[:, None], 0.0)
            if tap == 0:
                whole += tl.sum(given, 0)
        inside = (token < tokens)[:, None] & (channel < channels)[None, :]
        target = grad_x + token.to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(target, grad.to(grad_x.dtype.element_ty), mask=inside)
    inside = (channel < channels)[:, None] & (column < TAPS)[None, :]
    tl.store(grad_weight + (strip * channels + channel)[:, None] * TAPS + column[None, :], sums, mask=inside)
    if BIAS:
        tl.store(grad_bias + strip * channels + channel, whole, mask=channel < channels)


def _options(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> dict[str, Any]:
    tile = max(16, min(TILE, next_power(x.shape[1])))
    return {"TAPS": weight.shape[1], "BIAS": bias is not None, "SILU": silu, "TOKENS": TOKENS, "TILE": tile}


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        weight = weight.contiguous()
        tokens, channels = x.shape
        y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        options = _options(x, weight, bias, silu)
        grid = (cdiv(tokens, TOKENS), cdiv(channels, options["TILE"]))
        _forward[grid](x, weight, bias, positions, y, tokens, channels, x.stride(0), **options, num_warps=4)
        ctx.save_for_backward(x, weight, bias, positions)
        ctx.silu = silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, positions = ctx.saved_tensors
        tokens, channels = x.shape
        options = _options(x, weight, bias, ctx.silu)
        taps, strips = weight.shape[1], cdiv(tokens, TOKENS * STRIP)
        grad_x = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        grad_weight = torch.empty(strips, channels, taps, dtype=torch.float32, device=x.device)
        grad_bias = None if bias is None else grad_weight.new_empty(strips, channels)
        _backward[(strips, cdiv(channels, options["TILE"]))](
            *(grad_y.contiguous(), x, weight, bias, positions, grad_x, grad_weight, grad_bias),
            *(tokens, channels, x.stride(0)),
            **options,
            STRIP=STRIP,
            COLUMNS=next_power(taps),
            num_warps=4,
        )
        # Shares are summed in a fixed order: the result is the same in every run.
        whole = grad_weight.sum(0).to(weight.dtype)
        return grad_x, whole, None if bias is None or grad_bias is None else grad_bias.sum(0).to(bias.dtype), None, None


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """See :func:`megalight.ops.causal_conv.causal_conv`."""
    out: Tensor = apply(_Conv, x, weight, bias, positions, silu)
    return out
