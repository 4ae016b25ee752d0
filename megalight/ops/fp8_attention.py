"""Attention with 8-bit GEMMs: queries, keys, values, weights and their gradients are rounded to 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.ops.common import mask
from megalight.ops.quantize import quantize
from megalight.ops.quantize.formats import Quantized, Scheme
from megalight.registry import Backend, BackendRegistry
from megalight.types import PackedSequences


def emulated(spec: FP8AttentionSpec) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    """Return the function that computes what ``spec`` asks for. Its memory grows with the square of the length.

    Forward, of each sequence and head, with ``r`` for rounding to e4m3 with one scale of the whole tensor:

        ``w = exp(s - max(s))``, where ``s = scale r(q) r(k)^T``;  ``out = r(w) r(v) / sum(w)``.

    Backward, with ``g`` for rounding to the format of gradients, and ``p = w / sum(w)``:

        ``dv = r(p)^T g(dout)``;  ``ds = p (g(dout) r(v)^T - rowsum(g(dout) out))``;
        ``dq = scale g(ds) r(k)``;  ``dk = scale g(ds)^T r(q)``.

    Scales come from the largest magnitude of the current values. Weights lie between 0 and 1, so theirs is fixed.
    Kernels never hold a whole ``ds``, so they take its scale from earlier steps: this is where they differ.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
        out: Tensor = _FP8Attention.apply(q, k, v, sequences, spec)  # type: ignore[no-untyped-call]
        return out

    return attend


class _FP8Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: int, spec: FP8AttentionSpec) -> Tensor:
        value = Scheme("e4m3", scale="power" if spec.power else "fp32")
        quantized = [quantize(t.flatten(1), value) for t in (q, k, v)]
        ctx.spec, ctx.value = spec, value
        ctx.shapes = [(sequences, -1, *t.shape[1:]) for t in (q, k, v)]
        query, key, values = _decoded(quantized, ctx.shapes)
        scores = _scores(query, key, spec)
        peak = scores.amax(-1, keepdim=True)
        weights = (scores - peak).exp()
        total = weights.sum(-1, keepdim=True)
        out = _whole(_rounded(weights, value, 1.0) @ values / total).to(q.dtype)
        ctx.save_for_backward(*(tensor for each in quantized for tensor in each.tensors), peak + total.log(), out)
        return out.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *parts, log_total, out = ctx.saved_tensors
        spec, value, shapes = ctx.spec, ctx.value, ctx.shapes
        query, key, values = _decoded([Quantized(parts[i], parts[i + 1], value) for i in (0, 2, 4)], shapes)
        gradient = value._replace(format=spec.gradient)
        (grad_out,) = _decoded([quantize(grad.flatten(1), gradient)], shapes[:1])
        weights = (_scores(query, key, spec) - log_total).exp()
        grad_values = _rounded(weights, value, 1.0).mT @ grad_out
        product = (grad_out * _heads(out, shapes[0])).sum(-1, keepdim=True)
        grad_scores = _rounded(weights * (grad_out @ values.mT - product), gradient)
        scale = _scale(spec)
        grads = grad_scores @ key * scale, grad_scores.mT @ query * scale, grad_values
        # Heads that share a key head add up their gradients of it.
        shared = [t.reshape(len(t), s[2], -1, *t.shape[2:]).sum(2) for t, s in zip(grads, shapes, strict=True)]
        return *(_whole(t).reshape(-1, *s[2:]).to(grad.dtype) for t, s in zip(shared, shapes, strict=True)), None, None


def _scale(spec: FP8AttentionSpec) -> float:
    return 1 / math.sqrt(spec.head_dim) if spec.scale is None else spec.scale


def _heads(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``[T, H D] -> [B, H, S, D]`` in float64."""
    return flat.double().view(shape).transpose(1, 2)


def _whole(heads: Tensor) -> Tensor:
    """``[B, H, S, D] -> [T, H D]``."""
    return heads.transpose(1, 2).flatten(0, 1).flatten(1)


def _decoded(quantized: list[Quantized], shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return the values ``[B, H, S, D]`` in float64, with key heads repeated for the query heads that share them."""
    heads = [_heads(each.dequantize(), shape) for each, shape in zip(quantized, shapes, strict=True)]
    return [t.repeat_interleave(heads[0].shape[1] // t.shape[1], 1) for t in heads]


def _scores(query: Tensor, key: Tensor, spec: FP8AttentionSpec) -> Tensor:
    scores = query @ key.mT * _scale(spec)
    length = scores.shape[-1]
    allowed = mask(length, length, spec.causal, None, scores.device)
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _rounded(x: Tensor, scheme: Scheme, largest: float | None = None) -> Tensor:
    """Round ``[B, H, S, S]`` with one scale, which covers ``largest`` (None: the largest magnitude)."""
    amax = None if largest is None else torch.full((), largest, device=x.device)
    return quantize(x.flatten(0, -2), scheme, amax).dequantize().view_as(x)


WIDEST = 128
"""Largest head size. FP8 kernels of Hopper have no larger one."""
MULTIPLE = 16
"""Head sizes are multiples of this: 8-bit GEMMs contract sixteen elements at a time."""

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""``q [T, H, D], k, v [T, Hkv, D]``, number of equally long sequences ``-> [T, H, D]``."""


class FP8AttentionSpec(NamedTuple):
    """A request to 8-bit attention.

    Attributes:
        device: device type.
        dtype: dtype of queries, keys and values.
        head_dim: size of a head.
        causal: whether a query sees no later key.
        scale: factor of the scores; None: ``1 / sqrt(D)``.
        gradient: format of the gradients of output and scores. All else is e4m3.
        power: whether scales are powers of two.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    causal: bool = True
    scale: float | None = None
    gradient: Literal["e4m3", "e5m2"] = "e5m2"
    power: bool = False


FP8_ATTENTION: BackendRegistry[FP8AttentionSpec, Callable[[FP8AttentionSpec], Attend]] = BackendRegistry(
    "fp8_attention"
)
"""Backends are factories: what they make may have a state for each layer."""
REGISTRIES = (FP8_ATTENTION,)
EXAMPLE = FP8AttentionSpec("cpu", torch.bfloat16, 128)


def sizes_why_not(spec: FP8AttentionSpec) -> str | None:
    """Return why no 8-bit product serves the heads, or None."""
    if spec.head_dim % MULTIPLE or spec.head_dim > WIDEST:
        return f"needs heads of a multiple of {MULTIPLE} up to {WIDEST}, not {spec.head_dim}"
    return None


FP8_ATTENTION.register(Backend("reference", emulated, 0, sizes_why_not))


class FP8Attention:
    """8-bit attention of one layer.

    Args:
        name: name of the layer, for messages.
        spec: what to compute.
        backend: ``reference`` emulates on any device; plugins have kernels.

    Raises:
        BackendError: the backend cannot serve.
    """

    def __init__(self, name: str, spec: FP8AttentionSpec, backend: str) -> None:
        self.name = name
        self.attend = FP8_ATTENTION.select(spec, backend).fn(spec)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences) -> Tensor:
        """``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``.

        Raises:
            LayoutError: sequences have unequal lengths, or the keys are of other tokens than the queries.
        """
        if sequences.uniform is None or sequences.keys is not None:
            what = "the keys are not those of the queries" if sequences.keys is not None else "their lengths differ"
            raise LayoutError(
                f"{self.name}: attention in 8 bits (fp8_attention) serves equally long sequences that attend to "
                f"themselves, and {what}. Cut or pad sequences to one length, or leave out fp8_attention."
            )
        return self.attend(q, k, v, sequences.uniform[0])
