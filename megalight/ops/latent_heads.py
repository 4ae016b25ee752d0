"""Heads of latent attention (https://arxiv.org/abs/2405.04434): queries whose last features turn, and joined keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.common import last_contiguous, serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl
from megalight.ops.rotary import reference_apply_rotary
from megalight.registry import Backend, BackendRegistry, choose


def reference_rotate_tail(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """See :func:`megalight.ops.latent_heads.rotate_tail`."""
    width = 2 * cos.shape[-1]
    plain, turned = torch.split(x, [x.shape[-1] - width, width], -1)
    return torch.cat([plain, reference_apply_rotary(turned, cos, sin, interleaved)], -1)


def reference_join_keys(wide: Tensor, key: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """See :func:`megalight.ops.latent_heads.join_keys`."""
    k, v = torch.split(wide, [head_dim, wide.shape[-1] - head_dim], -1)
    # `expand` copies nothing. The concatenation is what writes the same features into every head.
    return torch.cat([k, key[:, None].expand(-1, k.shape[1], -1)], -1), v


HEADS = 16
"""Heads of a token that a program handles at once."""


@jit
def _move(
    source: Value, target: Value, head: Value,
    heads: Value, source_head: Value, target_head: Value, width: Value,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Copy ``[heads, width]``."""
    feature = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads)[:, None] & (feature < width)
    value = tl.load(source + head[:, None] * source_head + feature, mask=inside, other=0.0)
    tl.store(target + head[:, None] * target_head + feature, value, mask=inside)


@jit
def _tail(
    source: Value, target: Value, cos: Value, sin: Value, source_token: Value, source_head: Value,
    heads: Value, plain: Value, half: Value,
    INTERLEAVED: constexpr, BACKWARD: constexpr, HEADS: constexpr, PLAIN: constexpr, HALF: constexpr,
) -> None:  # fmt: skip
    """Copy the first ``plain`` features of heads, and rotate the others; the target is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    target_head = plain + 2 * half
    source += token * source_token
    target += token * heads * target_head
    _move(source, target, head, heads, source_head, target_head, plain, PLAIN)
    pair = tl.arange(0, HALF)
    c = tl.load(cos + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:  # the inverse rotation, which is also the transposed one
        s = -s
    source += plain
    target += plain
    if INTERLEAVED:
        # Neighbors are loaded together and parted in registers: loads of every other value would be slow.
        feature = tl.arange(0, 2 * HALF)[None, :]
        inside = (head < heads)[:, None] & (feature < 2 * half)
        both = tl.load(source + head[:, None] * source_head + feature, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (HEADS, HALF, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (HEADS, 2 * HALF))
        tl.store(target + head[:, None] * target_head + feature, turned.to(target.dtype.element_ty), mask=inside)
    else:
        inside = (head < heads)[:, None] & (pair < half)[None, :]
        first = source + head[:, None] * source_head + pair[None, :]
        a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
        out = target + head[:, None] * target_head + pair[None, :]
        tl.store(out, (a * c - b * s).to(target.dtype.element_ty), mask=inside)
        tl.store(out + half, (a * s + b * c).to(target.dtype.element_ty), mask=inside)


@jit
def _join(
    wide: Value, key: Value, out: Value, wide_token: Value, wide_head: Value, key_token: Value,
    heads: Value, own: Value, shared: Value,
    HEADS: constexpr, OWN: constexpr, SHARED: constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    size = own + shared
    out += token * heads * size
    _move(wide + token * wide_token, out, head, heads, wide_head, size, own, OWN)
    # a head stride of 0: the same features for each
    _move(key + token * key_token, out + own, head, heads, 0, size, shared, SHARED)


@jit
def _part(
    grad_k: Value, grad_v: Value, grad_wide: Value, grad_key: Value, k_token: Value, k_head: Value, v_token: Value,
    v_head: Value,
    heads: Value, own: Value, shared: Value, values: Value,
    HEADS: constexpr, OWN: constexpr, SHARED: constexpr, VALUES: constexpr,
) -> None:  # fmt: skip
    """Write the gradients of one token. A program sums the shared features over all heads, in a fixed order."""
    token = tl.program_id(0).to(tl.int64)
    grad_k += token * k_token
    grad_v += token * v_token
    grad_wide += token * heads * (own + values)
    feature = tl.arange(0, SHARED)
    total = tl.zeros((SHARED,), tl.float32)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        _move(grad_k, grad_wide, head, heads, k_head, own + values, own, OWN)
        _move(grad_v, grad_wide + own, head, heads, v_head, own + values, values, VALUES)
        inside = (head < heads)[:, None] & (feature < shared)[None, :]
        part = tl.load(grad_k + own + head[:, None] * k_head + feature[None, :], mask=inside, other=0.0)
        total += tl.sum(part.to(tl.float32), 0)
    tl.store(grad_key + token * shared + feature, total.to(grad_key.dtype.element_ty), mask=feature < shared)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    x = last_contiguous(x)
    tokens, heads, size = x.shape
    half = cos.shape[-1]
    plain = size - 2 * half
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _tail[(tokens, cdiv(heads, HEADS))](
        *(x, out, cos, sin, x.stride(0), x.stride(1), heads, plain, half),
        INTERLEAVED=interleaved, BACKWARD=backward, HEADS=HEADS, PLAIN=next_power(plain), HALF=next_power(half),
        num_warps=4,
    )  # fmt: skip
    return out


class _RotateTail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, ctx.interleaved, True), None, None, None


class _JoinKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor, key: Tensor, own: int) -> tuple[Tensor, Tensor]:
        wide, key = last_contiguous(wide), last_contiguous(key)
        tokens, heads, _ = wide.shape
        shared = key.shape[-1]
        k = wide.new_empty(tokens, heads, own + shared)
        _join[(tokens, cdiv(heads, HEADS))](
            *(wide, key, k, wide.stride(0), wide.stride(1), key.stride(0), heads, own, shared),
            HEADS=HEADS, OWN=next_power(own), SHARED=next_power(shared), num_warps=4,
        )  # fmt: skip
        ctx.own, ctx.dtype = own, key.dtype
        return k, wide[..., own:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        grad_k, grad_v = last_contiguous(grad_k), last_contiguous(grad_v)
        tokens, heads, size = grad_k.shape
        own, values = ctx.own, grad_v.shape[-1]
        shared = size - own
        grad_wide = grad_k.new_empty(tokens, heads, own + values)
        grad_key = grad_k.new_empty(tokens, shared, dtype=ctx.dtype)
        strides = (*grad_k.stride()[:2], *grad_v.stride()[:2])
        _part[(tokens,)](
            *(grad_k, grad_v, grad_wide, grad_key, *strides, heads, own, shared, values),
            HEADS=HEADS, OWN=next_power(own), SHARED=next_power(shared), VALUES=next_power(values), num_warps=4,
        )  # fmt: skip
        return grad_wide, grad_key, None


def triton_rotate_tail(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """See :func:`megalight.ops.latent_heads.rotate_tail`.

    torch concatenates parts of wider rows at a fraction of the memory's speed, and the backward of a split does so
    again.
    """
    out: Tensor = apply(_RotateTail, x, cos.contiguous(), sin.contiguous(), interleaved)
    return out


def triton_join_keys(wide: Tensor, key: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """See :func:`megalight.ops.latent_heads.join_keys`."""
    out: tuple[Tensor, Tensor] = apply(_JoinKeys, wide, key, head_dim)
    return out


class LatentHeadsSpec(NamedTuple):
    """A request: device type, and dtype of the heads."""

    device: str
    dtype: torch.dtype


ROTATE_TAIL: BackendRegistry[LatentHeadsSpec, Callable[..., Tensor]] = BackendRegistry("rotate_tail")
JOIN_KEYS: BackendRegistry[LatentHeadsSpec, Callable[..., tuple[Tensor, Tensor]]] = BackendRegistry("join_keys")
REGISTRIES: tuple[BackendRegistry[LatentHeadsSpec, Any], ...] = (ROTATE_TAIL, JOIN_KEYS)
EXAMPLE = LatentHeadsSpec("cpu", torch.bfloat16)


def _triton_why_not(spec: LatentHeadsSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


ROTATE_TAIL.register(Backend("triton", triton_rotate_tail, 20, _triton_why_not))
ROTATE_TAIL.register(Backend("reference", reference_rotate_tail, 0, serve_all))
JOIN_KEYS.register(Backend("triton", triton_join_keys, 20, _triton_why_not))
JOIN_KEYS.register(Backend("reference", reference_join_keys, 0, serve_all))


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, backend: str = "auto") -> Tensor:
    """Rotate the last ``r = 2 * cos.shape[-1]`` features of every head, in one pass.

    Args:
        x: ``[T, H, D]``.
        cos: ``[T, r/2]``, from :func:`~megalight.ops.rotary.rotary_table`.
        sin: ``[T, r/2]``.
        interleaved: as in :func:`~megalight.ops.rotary.apply_rotary`.
        backend: name of a backend.
    """
    out: Tensor = choose(ROTATE_TAIL, LatentHeadsSpec(x.device.type, x.dtype), backend)(x, cos, sin, interleaved)
    return out


def join_keys(wide: Tensor, key: Tensor, head_dim: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Split keys from values, and append the features that all key heads share.

    Args:
        wide: ``[T, H, D + V]``, the keys' own features and the values.
        key: ``[T, R]``, the shared features.
        head_dim: ``D``.
        backend: name of a backend.

    Returns:
        keys ``[T, H, D + R]`` and values ``[T, H, V]``, which are a view of ``wide``.
    """
    fn = choose(JOIN_KEYS, LatentHeadsSpec(wide.device.type, wide.dtype), backend)
    out: tuple[Tensor, Tensor] = fn(wide, key, head_dim)
    return out
