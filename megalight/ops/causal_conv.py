"""Causal convolution of every channel on its own, within packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.common import serve_all, triton_why_not, wide
from megalight.ops.jit import Value, cdiv, constexpr, jit, sigmoid, tl
from megalight.ops.row_indexing import empty_gradient, place_of
from megalight.registry import Backend, BackendRegistry, choose
from megalight.types import PackedSequences


def reference_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """See :func:`megalight.ops.causal_conv.causal_conv`."""
    # columns as a list, the token's own first
    taps = weight.to(wide(x.dtype)).flip(1).unbind(1)
    places = positions[:, None]
    y = taps[0] * x
    for shift, tap in enumerate(taps[1:], 1):
        # shift the packed tokens as one sequence, then clear places that crossed the start of their own sequence
        y = y + tap * F.pad(x, (0, 0, shift, 0))[: len(x)].masked_fill(places < shift, 0)
    y = y if bias is None else y + bias.to(y.dtype)
    return (F.silu(y) if silu else y).to(x.dtype)


ROW = 128
"""Channels of a program, one warp."""
STRIP = 128
"""Tokens, one after another, of a program of the backward, which writes its weight gradients once."""
FORWARD_STRIP = 64
"""Tokens of a program of the forward."""
AHEAD = 4
"""Tokens whose rows a program loads at once."""


@jit
def _none() -> Any:
    """Return a tuple to add to. (Its type is not known to type checkers.)"""
    return ()


@jit
def _row(pointer: Value, stride: Value, token: Value, channel: Value, inside: Value, MASKED: constexpr) -> Value:
    """Load a token's channels in float32; 0 outside of ``inside``."""
    place = pointer + tl.cast(token, tl.int64) * stride + channel
    if MASKED:
        return tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return tl.load(place).to(tl.float32)


@jit
def _rows(
    pointer: Value, stride: Value, first: Value, tokens: Value, channel: Value, within: Value,
    AHEAD: constexpr, MASKED: constexpr,
) -> Any:  # fmt: skip
    """Load the channels of ``AHEAD`` tokens; 0 after the last token."""
    rows = _none()
    for step in tl.static_range(AHEAD):
        inside = within & (first + step < tokens)
        rows += (_row(pointer, stride, first + step, channel, inside, MASKED),)
    return rows


@jit
def _read(own: Value, past: Value, place: Value, TAPS: constexpr, MASKED: constexpr) -> Any:
    """Return the rows that a token reads, its own first.

    The packed tokens are one row: a sequence reads nothing of the one before.
    """
    read = _none()
    read += (own,)
    for tap in tl.static_range(1, TAPS):
        read += (tl.where(place >= tap, past[tap - 1], 0.0) if MASKED else past[tap - 1],)
    return read


@jit
def _constants(
    weight: Value, bias: Value, channel: Value, within: Value, TAPS: constexpr, BIAS: constexpr, ROW: constexpr
) -> Any:
    """Return the factors of a token and of those before it, the nearest first, and the bias."""
    factors = _none()
    for tap in tl.static_range(TAPS):
        factors += (tl.load(weight + channel * TAPS + (TAPS - 1 - tap), mask=within, other=0.0).to(tl.float32),)
    offset = tl.zeros((ROW,), tl.float32)
    if BIAS:
        offset += tl.load(bias + channel, mask=within, other=0.0).to(tl.float32)
    return factors, offset


@jit
def _place(positions: Value, token: Value, tokens: Value) -> Value:
    """Load a token's place in its sequence; -1 after the last token."""
    return tl.load(positions + token, mask=token < tokens, other=-1)


@jit
def _forward_group(
    x: Value, positions: Value, y: Value, first: Value, past: Value, factors: Value, offset: Value,
    tokens: Value, channels: Value, stride: Value, channel: Value, within: Value,
    TAPS: constexpr, SILU: constexpr, AHEAD: constexpr, MASKED: constexpr,
) -> Any:  # fmt: skip
    """Write ``AHEAD`` rows; return the last rows, the nearest first."""
    own = _rows(x, stride, first, tokens, channel, within, AHEAD, MASKED)
    for step in tl.static_range(AHEAD):
        token = first + step
        place = _place(positions, token, tokens) if MASKED else 0
        read = _read(own[step], past, place, TAPS, MASKED)
        out = offset + factors[0] * read[0]
        for tap in tl.static_range(1, TAPS):
            out += factors[tap] * read[tap]
        if SILU:
            out = out * sigmoid(out)
        target = y + tl.cast(token, tl.int64) * channels + channel
        if MASKED:
            tl.store(target, out.to(y.dtype.element_ty), mask=within & (token < tokens))
        else:
            tl.store(target, out.to(y.dtype.element_ty))
        past = read[: TAPS - 1]
    return past


@jit
def _forward(
    x: Value, weight: Value, bias: Value, positions: Value, y: Value,
    tokens: Value, channels: Value, stride: Value,
    TAPS: constexpr, BIAS: constexpr, SILU: constexpr, ROW: constexpr, STRIP: constexpr, AHEAD: constexpr,
) -> None:  # fmt: skip
    """Write a strip of rows. Tokens come one after another; the rows before a token stay in registers."""
    channel = tl.program_id(1) * ROW + tl.arange(0, ROW)
    within = channel < channels
    full = (tl.program_id(1) + 1) * ROW <= channels
    begin = tl.program_id(0) * STRIP
    factors, offset = _constants(weight, bias, channel, within, TAPS, BIAS, ROW)
    past = _none()
    for tap in tl.static_range(1, TAPS):
        past += (_row(x, stride, begin - tap, channel, within & (begin >= tap), True),)
    following = _place(positions, begin + AHEAD - 1, tokens)
    for first in range(begin, begin + STRIP, AHEAD):
        place = following
        following = _place(positions, first + 2 * AHEAD - 1, tokens)
        if full & (place >= AHEAD + TAPS - 2):
            # All tokens of the group, and those that they read, are of one sequence.
            past = _forward_group(
                *(x, positions, y, first, past, factors, offset, tokens, channels, stride, channel, within),
                *(TAPS, SILU, AHEAD, False),
            )
        else:
            past = _forward_group(
                *(x, positions, y, first, past, factors, offset, tokens, channels, stride, channel, within),
                *(TAPS, SILU, AHEAD, True),
            )


@jit
def _backward_group(
    grad_y: Value, x: Value, positions: Value, grad_x: Value, first: Value, begin: Value, stop: Value, past: Value,
    open_: Value, sums: Value, whole: Value, factors: Value, offset: Value,
    tokens: Value, channels: Value, stride: Value, grad_stride: Value, channel: Value, within: Value,
    TAPS: constexpr, SILU: constexpr, AHEAD: constexpr, MASKED: constexpr,
) -> Any:  # fmt: skip
    """Take ``AHEAD`` tokens; return ``past``, ``open_``, ``sums`` and ``whole`` after them."""
    own = _rows(x, stride, first, tokens, channel, within, AHEAD, MASKED)
    given = _rows(grad_y, channels, first, tokens, channel, within, AHEAD, MASKED)
    for step in tl.static_range(AHEAD):
        token = first + step
        place = _place(positions, token, tokens) if MASKED else 0
        read = _read(own[step], past, place, TAPS, MASKED)
        grad = given[step]
        if SILU:
            before = offset + factors[0] * read[0]
            for tap in tl.static_range(1, TAPS):
                before += factors[tap] * read[tap]
            share = sigmoid(before)
            grad *= share * (1 + before * (1 - share))
        # A pair of tokens counts in the strip of the one that reads.
        counted = grad * tl.where(token < stop, 1.0, 0.0) if MASKED else grad
        whole += counted
        more = _none()
        added = _none()
        for tap in tl.static_range(TAPS):
            more += (sums[tap] + counted * read[tap],)
            if tap == 0:
                added += (factors[tap] * grad,)
            else:
                shared = tl.where(place >= tap, grad, 0.0) if MASKED else grad
                added += (open_[tap - 1] + factors[tap] * shared,)
        sums = more
        done = token - (TAPS - 1)
        target = grad_x + tl.cast(done, tl.int64) * grad_stride + channel
        last = added[TAPS - 1].to(grad_x.dtype.element_ty)
        if MASKED:
            tl.store(target, last, mask=within & (done >= begin) & (done < stop))
        else:
            tl.store(target, last)
        past = read[: TAPS - 1]
        open_ = added[: TAPS - 1]
    return past, open_, sums, whole


@jit
def _backward(
    grad_y: Value, x: Value, weight: Value, bias: Value, positions: Value, grad_x: Value, grad_weight: Value,
    grad_bias: Value,
    tokens: Value, channels: Value, stride: Value, grad_stride: Value,
    TAPS: constexpr, BIAS: constexpr, SILU: constexpr, ROW: constexpr, STRIP: constexpr, AHEAD: constexpr,
) -> None:  # fmt: skip
    """Write the gradient of a strip of rows, and the strip's share of those of weight and bias.

    Tokens come one after another. What a token reads again, and what is still to come for the gradients of the tokens
    that it reads, stays in registers.
    """
    strip = tl.program_id(0)
    channel = tl.program_id(1) * ROW + tl.arange(0, ROW)
    within = channel < channels
    full = (tl.program_id(1) + 1) * ROW <= channels
    begin = strip * STRIP
    stop = tl.minimum(begin + STRIP, tokens)
    factors, offset = _constants(weight, bias, channel, within, TAPS, BIAS, ROW)
    whole = tl.zeros((ROW,), tl.float32)
    past = _none()
    open_ = _none()
    sums = _none()
    sums += (whole,)
    for tap in tl.static_range(1, TAPS):
        past += (_row(x, stride, begin - tap, channel, within & (begin >= tap), True),)
        open_ += (whole,)
        sums += (whole,)
    following = _place(positions, begin + AHEAD - 1, tokens)
    # The tokens after the strip still read from it.
    for first in range(begin, begin + STRIP + TAPS - 1, AHEAD):
        place = following
        following = _place(positions, first + 2 * AHEAD - 1, tokens)
        # A group whose tokens, and those that they read, are of one sequence and of this strip.
        if full & (place >= AHEAD + TAPS - 2) & (first >= begin + TAPS - 1) & (first + AHEAD <= stop):
            past, open_, sums, whole = _backward_group(
                *(grad_y, x, positions, grad_x, first, begin, stop, past, open_, sums, whole, factors, offset),
                *(tokens, channels, stride, grad_stride, channel, within, TAPS, SILU, AHEAD, False),
            )
        else:
            past, open_, sums, whole = _backward_group(
                *(grad_y, x, positions, grad_x, first, begin, stop, past, open_, sums, whole, factors, offset),
                *(tokens, channels, stride, grad_stride, channel, within, TAPS, SILU, AHEAD, True),
            )
    row = tl.cast(strip, tl.int64) * channels + channel
    for tap in tl.static_range(TAPS):
        tl.store(grad_weight + row * TAPS + (TAPS - 1 - tap), sums[tap], mask=within)
    if BIAS:
        tl.store(grad_bias + row, whole, mask=within)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
        ctx.place = place_of(x)
        x = x if x.stride(1) == 1 else x.contiguous()
        weight = weight.contiguous()
        tokens, channels = x.shape
        y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        _forward[(cdiv(tokens, FORWARD_STRIP), cdiv(channels, ROW))](
            *(x, weight, bias, positions, y, tokens, channels, x.stride(0)),
            TAPS=weight.shape[1], BIAS=bias is not None, SILU=silu, ROW=ROW, STRIP=FORWARD_STRIP, AHEAD=AHEAD,
            num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, positions)
        ctx.silu = silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, positions = ctx.saved_tensors
        tokens, channels = x.shape
        taps, strips = weight.shape[1], cdiv(tokens, STRIP)
        grad_x = empty_gradient(x, ctx.place)
        grad_weight = torch.empty(strips, channels, taps, dtype=torch.float32, device=x.device)
        grad_bias = None if bias is None else grad_weight.new_empty(strips, channels)
        _backward[(strips, cdiv(channels, ROW))](
            *(grad_y.contiguous(), x, weight, bias, positions, grad_x, grad_weight, grad_bias),
            *(tokens, channels, x.stride(0), grad_x.stride(0)),
            TAPS=taps, BIAS=bias is not None, SILU=ctx.silu, ROW=ROW, STRIP=STRIP, AHEAD=AHEAD, num_warps=1,
        )  # fmt: skip
        # Shares are summed in a fixed order: the result is the same in every run.
        whole = grad_weight.sum(0).to(weight.dtype)
        return grad_x, whole, None if bias is None or grad_bias is None else grad_bias.sum(0).to(bias.dtype), None, None


def triton_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """See :func:`megalight.ops.causal_conv.causal_conv`.

    A program goes through a strip of tokens in order, and reads every row once: what later tokens read again stays
    in registers. The backward computes what goes into SiLU again: nothing but the input is kept.
    """
    out: Tensor = apply(_Conv, x, weight, bias, positions, silu)
    return out


class CausalConvSpec(NamedTuple):
    """A request to the convolution: device type, dtypes of input and weight, and numbers of taps and of channels."""

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    taps: int
    channels: int = 1024


CAUSAL_CONV: BackendRegistry[CausalConvSpec, Callable[..., Tensor]] = BackendRegistry("causal_conv")
REGISTRIES = (CAUSAL_CONV,)
EXAMPLE = CausalConvSpec("cpu", torch.bfloat16, torch.bfloat16, 4)

MAX_TAPS = 8
"""Most taps of the kernels, which read a row again for each."""


def _triton_why_not(spec: CausalConvSpec) -> str | None:
    if spec.taps > MAX_TAPS:
        return f"serves at most {MAX_TAPS} taps, not {spec.taps}"
    return triton_why_not(spec.device, spec.dtype, spec.weight_dtype)


CAUSAL_CONV.register(Backend("triton", triton_causal_conv, 20, _triton_why_not))
CAUSAL_CONV.register(Backend("reference", reference_causal_conv, 0, serve_all))


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequences: PackedSequences,
    *,
    silu: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``y[t] = sum_j weight[:, k - 1 - j] * x[t - j] + bias``; before the start of a sequence, ``x`` is 0.

    Half dtypes are summed in float32.

    Args:
        x: ``[T, channels]``. Rows may lie apart in memory (a part of a fused projection's output).
        weight: ``[channels, k]``. The last column is for the token itself.
        bias: ``[channels]``, or None.
        sequences: how the tokens divide into sequences, which are whole.
        silu: return ``silu(y)``.
        backend: a backend's name, or ``auto``.
    """
    spec = CausalConvSpec(x.device.type, x.dtype, weight.dtype, weight.shape[1], x.shape[1])
    return choose(CAUSAL_CONV, spec, backend)(x, weight, bias, sequences.positions, silu)
