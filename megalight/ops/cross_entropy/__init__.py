"""Linear layer and cross entropy in one op, over chunks of tokens: only as many logits exist as fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.autograd import once_differentiable
from megalight.ops.batch_invariant import MODE, refuse, with_gradient_of
from megalight.ops.batch_invariant.cross_entropy import linear_losses
from megalight.ops.common import lazy, serve_all, triton_why_not, wide
from megalight.ops.linear import WGRAD, WeightGradientSpec
from megalight.ops.parameter import main_grad_of, put, state_of
from megalight.registry import Backend, BackendRegistry, choose


def reference_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    chunk: int | None,
    first_row: int,
    num_rows: int,
    combine: Combine | None,
) -> Tensor:
    """Return ``logsumexp(logits) - logits[label]`` per token; 0 if the label is negative.

    With ``combine``, only values are right, not gradients.
    """
    dtype = wide(hidden.dtype)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    real = max(0, min(weight.shape[0], num_rows - first_row))
    # Columns of padding are cut off before the sum.
    logits = logits[:, :real]
    local = labels - first_row
    inside = (local >= 0) & (local < real)
    target = torch.zeros_like(logits[:, 0]) if real == 0 else logits.gather(1, local.clamp(0, real - 1)[:, None])[:, 0]
    target = target.where(inside, torch.zeros_like(target))
    logsumexp = logits.logsumexp(-1)
    if combine is not None:
        logsumexp, target = combine(logsumexp, target)
    return (logsumexp - target).masked_fill(labels < 0, 0.0)


BLOCK = 1 << 24
"""Number of logits that are processed at once."""


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return ``softcap tanh(logits / softcap)``, in float32 or wider."""
    logits = logits.to(wide(logits.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def blocks(logits: Tensor) -> list[slice]:
    """Return slices of a few rows: intermediate results have a wider dtype and several copies in memory."""
    step = max(1, BLOCK // max(1, logits.shape[1]))
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def statistics(logits: Tensor, labels: Tensor, real: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return ``logsumexp`` over the first ``real`` columns of ``logits [T, V]``, and the logit of the label.

    The logit of labels outside ``[0, real)`` is 0.
    """
    # If this rank holds padding only, its part of the vocabulary has probability 0: a log-sum-exp of -inf.
    logsumexp = torch.full(labels.shape, -torch.inf, dtype=wide(logits.dtype), device=logits.device)
    target = torch.zeros_like(logsumexp)
    for part in blocks(logits) if real else ():
        # Labels outside this part of the vocabulary are clamped for `gather`, which checks bounds, and masked
        # afterwards.
        values = capped(logits[part, :real], softcap)
        inside = (labels[part] >= 0) & (labels[part] < real)
        logsumexp[part] = values.logsumexp(-1)
        target[part] = values.gather(1, labels[part].clamp(0, real - 1)[:, None])[:, 0].where(inside, target[part])
    return logsumexp, target


def gradient_(
    logits: Tensor, labels: Tensor, logsumexp: Tensor, grad: Tensor, real: int, softcap: float | None
) -> None:
    """Overwrite ``logits [T, V]`` with the gradient of ``sum(grad * (logsumexp - target))``."""
    # Padding has no gradient. (Its logits are arbitrary, so exp() of them could be infinite.)
    logits[:, real:] = 0
    for part in blocks(logits) if real else ():
        values = capped(logits[part, :real], softcap)
        # softmax - one-hot. With the log-sum-exp of all ranks, each rank computes its columns without communication.
        slope = (values - logsumexp[part, None]).exp()
        inside = (labels[part] >= 0) & (labels[part] < real)
        slope.scatter_add_(1, labels[part].clamp(0, real - 1)[:, None], -inside[:, None].to(slope.dtype))
        slope.mul_(grad[part, None])
        if softcap is not None:
            # The derivative of c tanh(x / c) is 1 - tanh(x / c)^2, and `values` is c tanh(x / c).
            slope.mul_(1 - (values / softcap).square())
        logits[part, :real] = slope


ALIGNED = 64
"""Rows of the vocabulary that fast kernels take a multiple of: 128 bytes of logits in half precision."""


def vocabulary_blocks(rows: int) -> list[slice]:
    """Divide rows of the vocabulary into an aligned block and the rest. An empty one is left out.

    Vocabularies often have an odd number of rows (GPT-2: 50,257). The libraries then take kernels for unaligned
    matrices, which are up to eight times slower, although rows of the logits start at aligned addresses. So on a
    GPU the rows beyond the last multiple of :data:`ALIGNED` have a small product of their own.
    """
    even = rows - rows % ALIGNED
    return [slice(start, end) for start, end in ((0, even), (even, rows)) if start < end]


def _vocabulary_blocks_on(device: torch.device, rows: int) -> list[slice]:
    return vocabulary_blocks(rows) if device.type == "cuda" else [slice(0, rows)]


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits ``[T, V]`` of ``hidden [T, h]`` and ``weight [V, h]``.

    On a GPU, rows start at multiples of 128 bytes. Not so on a CPU: bf16 products with AMX read the padding between
    rows, and a NaN there damages the result (torch 2.13).
    """
    size = weight.shape[0]
    aligned = -(-size // ALIGNED) * ALIGNED if hidden.is_cuda else size
    out = torch.empty(hidden.shape[0], aligned, dtype=hidden.dtype, device=hidden.device)[:, :size]
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    for rows in _vocabulary_blocks_on(hidden.device, size):
        if bias is None:
            torch.mm(hidden, weight[rows].T, out=out[:, rows])
        else:
            torch.addmm(bias[rows], hidden, weight[rows].T, out=out[:, rows])
    return out


def propagate(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needed: Sequence[bool],
    slopes: Iterable[tuple[slice, Tensor]],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states, weight and bias, or add the last two to their main gradients.

    Args:
        needed: which of the three need a gradient.
        slopes: the tokens of each chunk, and the gradient of its logits ``[chunk, V]``, made when it is asked for.
    """
    need_hidden, need_weight, need_bias = needed
    grad_hidden = torch.empty_like(hidden) if need_hidden else None
    grad_weight, main = _gradient_buffer(weight, need_weight)
    grad_bias, main_bias = _gradient_buffer(bias, need_bias)
    for part, logits in slopes:
        rows = _vocabulary_blocks_on(logits.device, logits.shape[1])
        if grad_hidden is not None:
            _times_weight(logits, weight.to(logits.dtype), rows, grad_hidden[part])
        if main is not None:
            spec = WeightGradientSpec(logits.device.type, logits.dtype, main.dtype)
            # `touch()` is True for the first write of a step only: the first chunk overwrites, later chunks add.
            first = state_of(weight).touch()
            for block in rows:
                choose(WGRAD, spec)(main[block], logits[:, block], hidden[part], first)
        if bias is not None and main_bias is not None:
            put(main_bias, logits.sum(0, dtype=main_bias.dtype), state_of(bias).touch())
    for parameter, target, own in ((weight, main, grad_weight), (bias, main_bias, grad_bias)):
        if parameter is not None and target is not None and own is None:
            state = state_of(parameter)
            if state.touch():  # no chunk wrote it: there were no tokens
                target.zero_()
            # Once per call, after the last chunk: the data-parallel engine may start to reduce the bucket at once.
            state.mark_grad_ready()
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _times_weight(logits: Tensor, weight: Tensor, rows: Sequence[slice], out: Tensor) -> None:
    # The small block comes first: the sum is rounded to half precision between the two.
    for add, block in enumerate(reversed(rows)):
        torch.addmm(out, logits[:, block], weight[block], beta=1 if add else 0, out=out)


def _gradient_buffer(parameter: Tensor | None, needed: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return ``(own, target)``: a new buffer to return (None if there is a main gradient), and the buffer to add to."""
    if parameter is None or not needed:
        return None, None
    main = main_grad_of(parameter)
    if main is not None:
        return None, main
    # Chunks are added up in float32, and rounded to the parameter's dtype once, at the end.
    own = torch.zeros_like(parameter, dtype=wide(parameter.dtype))
    return own, own


Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
SHARE = 1 / 32
"""Share of the device's memory that logits may take.

Logits that do not fit are computed a second time in the backward: a fourth matmul beside the usual three, and
one more pass over the main gradient for each chunk.
"""

CHUNKS = 4
"""Number of chunks in this share if it does not hold all logits: one is being computed, the others are kept."""

TILE = 128
"""Rows that a matmul computes at once. Chunks are multiples of it."""


@dataclass(frozen=True)
class CrossEntropyKernels:
    """The row-wise kernels of a backend.

    Attributes:
        statistics: ``(logits, labels, real, softcap) -> logsumexp, target logit``.
        gradient_: ``(logits, labels, logsumexp, grad, real, softcap)``, in place on ``logits``.
    """

    statistics: Callable[[Tensor, Tensor, int, float | None], tuple[Tensor, Tensor]]
    gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], None]


@dataclass(frozen=True)
class CrossEntropyConstants:
    """The constants of one call.

    Attributes:
        rows: the row-wise kernels.
        chunk: tokens per chunk.
        kept: number of chunks, the first ones, whose logits are kept for the backward.
        real: number of rows of the weight that are no padding.
        softcap: soft cap of the logits.
    """

    rows: CrossEntropyKernels
    chunk: int
    kept: int
    real: int
    softcap: float | None


def chunked_cross_entropy(
    rows: CrossEntropyKernels,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    chunk: int | None,
    first_row: int,
    num_rows: int,
    combine: Combine | None,
) -> Tensor:
    """Implement :func:`linear_cross_entropy` with the row-wise kernels of a backend, over chunks of tokens."""
    size = weight.shape[0]
    # `kept` is 0 without a graph (evaluation): logits of one chunk at a time exist then.
    chunk, kept = cut(hidden.shape[0], size * hidden.element_size(), chunk, memory_of(hidden.device) * SHARE)
    real = max(0, min(size, num_rows - first_row))
    plan = CrossEntropyConstants(rows, chunk, kept if torch.is_grad_enabled() else 0, real, softcap)
    # Labels relative to the first row of this weight. Ignored labels, and labels of earlier rows, are negative.
    local = labels if first_row == 0 else (labels - first_row).where(labels >= 0, labels)
    # `ignored` is a tensor of its own: the subtraction above makes labels of earlier ranks' rows negative too, and
    # those tokens do have a loss.
    losses: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, local, labels < 0, plan, combine)  # type: ignore[no-untyped-call]
    return losses


def cut(tokens: int, row_bytes: int, chunk: int | None, memory: float) -> tuple[int, int]:
    """Return the tokens per chunk, and the number of chunks whose logits can be kept beside the one being computed.

    Args:
        tokens: number of tokens.
        row_bytes: size of the logits of one token, in bytes.
        chunk: tokens per chunk, if given.
        memory: bytes that logits may take.
    """
    fits = tokens * row_bytes <= memory
    if chunk is None and fits:
        chunk = max(1, tokens)
    elif chunk is None:
        most = max(1, int(memory / (CHUNKS * row_bytes)))
        # A chunk that is no multiple of the tile would waste part of a tile in every chunk, not only in the last one.
        most -= most % TILE if most > TILE else 0
        # Spread the tokens evenly over the chunks: a short last chunk would run at low utilization.
        even = -(-tokens // -(-tokens // most))
        chunk = min(most, -(-even // TILE) * TILE)
    # One chunk of the share is for the logits that are being computed now.
    return chunk, -(-tokens // chunk) if fits else max(0, int(memory / (chunk * row_bytes)) - 1)


@lru_cache
def memory_of(device: torch.device) -> int:
    """Return the memory of a device, or of this machine for the CPU, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignored: Tensor,
        plan: CrossEntropyConstants,
        combine: Combine | None,
    ) -> Tensor:
        tokens = hidden.shape[0]
        # Sums over the vocabulary are in float32: in bf16, 100,000 terms of similar size would stop adding up.
        logsumexp = torch.empty(tokens, dtype=wide(hidden.dtype), device=hidden.device)
        target = torch.empty_like(logsumexp)
        kept: list[Tensor] = []
        for start in range(0, tokens, plan.chunk):
            part = slice(start, start + plan.chunk)
            logits = logits_of(hidden[part], weight, bias)
            logsumexp[part], target[part] = plan.rows.statistics(logits, labels[part], plan.real, plan.softcap)
            if len(kept) < plan.kept:
                kept.append(logits)
        # The parts of the vocabulary meet here, once for all chunks: one collective per call, and all ranks call it,
        # whatever the number of chunks on each of them.
        if combine is not None:
            logsumexp, target = combine(logsumexp, target)
        # Keep parameters by reference: tensors that saved-tensor hooks return would not have their attributes.
        ctx.weight, ctx.bias, ctx.plan, ctx.kept = weight, bias, plan, kept
        ctx.save_for_backward(hidden, labels, ignored, logsumexp.contiguous())
        # Masked last, by a value: 0 * NaN of an ignored token would still be NaN.
        return (logsumexp - target).masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels, ignored, logsumexp = ctx.saved_tensors
        weight, bias, plan = ctx.weight, ctx.bias, ctx.plan
        kept, ctx.kept = ctx.kept, []  # they are overwritten below; a second backward computes them again
        # Zero also stops a NaN gradient of an ignored token from spreading into the weight gradient.
        grad = grad.masked_fill(ignored, 0.0).contiguous()  # the gradient of a sum is an expanded scalar

        def slopes() -> Iterator[tuple[slice, Tensor]]:
            for start in range(0, hidden.shape[0], plan.chunk):
                part = slice(start, start + plan.chunk)
                # The first chunks are the ones that were kept. Popping frees each as soon as its gradient has been
                # used.
                logits = kept.pop(0) if kept else logits_of(hidden[part], weight, bias)
                # In place: from here on `logits` holds the gradient of the logits `[chunk, V]`.
                plan.rows.gradient_(logits, labels[part], logsumexp[part], grad[part], plan.real, plan.softcap)
                yield part, logits

        return (*propagate(hidden, weight, bias, ctx.needs_input_grad[:3], slopes()), None, None, None, None)


class CrossEntropySpec(NamedTuple):
    """A request to the loss: device type, dtype of the hidden states."""

    device: str
    dtype: torch.dtype


CROSS_ENTROPY: BackendRegistry[CrossEntropySpec, Callable[..., Tensor]] = BackendRegistry("linear_cross_entropy")
REGISTRIES: tuple[BackendRegistry[CrossEntropySpec, Any], ...] = (CROSS_ENTROPY,)
EXAMPLE = CrossEntropySpec("cpu", torch.bfloat16)


def _triton_why_not(spec: CrossEntropySpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


_KERNELS = "megalight.ops.cross_entropy.triton"
_TRITON = CrossEntropyKernels(lazy(_KERNELS, "statistics"), lazy(_KERNELS, "gradient_"))
_TORCH = CrossEntropyKernels(statistics, gradient_)
CROSS_ENTROPY.register(Backend("triton", partial(chunked_cross_entropy, _TRITON), 20, _triton_why_not))
CROSS_ENTROPY.register(Backend("torch", partial(chunked_cross_entropy, _TORCH), 10, serve_all))
CROSS_ENTROPY.register(Backend("reference", reference_linear_cross_entropy, 0, serve_all))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    first_row: int = 0,
    num_rows: int | None = None,
    combine: Combine | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return ``-log softmax(hidden W^T + b)[label]`` of every token.

    Logits have the dtype of ``hidden`` (with sums in float32) and take up to 1/32 of the device's memory. Logits that
    fit are kept for the backward; others are computed again, a chunk of tokens at a time. If the weight or the bias has
    a main gradient, its gradient is added there once per chunk, as in :func:`megalight.ops.linear.linear`.

    Args:
        hidden: ``[T, h]``.
        weight: ``[V, h]``: rows ``first_row`` to ``first_row + V`` of the vocabulary.
        labels: ``[T]`` int64 rows of the vocabulary. Negative labels are ignored: loss 0, no gradient.
        bias: ``[V]``.
        softcap: logits become ``softcap * tanh(logit / softcap)`` (Gemma 2).
        chunk: tokens per chunk. None: as many as the memory allows.
        first_row: row of the vocabulary that is the first row of ``weight``.
        num_rows: number of real rows of the vocabulary; later rows are padding with probability 0. None: all rows.
        combine: ``(logsumexp [T], target_logit [T]) -> (logsumexp, target_logit)`` combines the results of several
            parts of the vocabulary. The target logit is 0 if another part has the label. The gradient of ``hidden`` is
            then only this part's term of a sum.
        backend: name of a backend.

    Returns:
        losses ``[T]`` in float32 (float64 for float64).
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    real = first_row + weight.shape[0] if num_rows is None else num_rows
    if MODE.on:
        if combine is not None or real != weight.shape[0]:
            refuse("losses over a divided vocabulary")

        def ordinary(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return linear_cross_entropy(hidden, weight, labels, bias=bias, softcap=softcap, backend=backend)

        def invariant(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return linear_losses(hidden, weight, labels, bias, softcap)

        return with_gradient_of(ordinary, invariant, (hidden, weight, bias))
    fn = choose(CROSS_ENTROPY, CrossEntropySpec(device, hidden.dtype), backend)
    return fn(hidden, weight, labels, bias, softcap, chunk, first_row, real, combine)


Choose: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Largest logits ``[T]`` of each rank, and their rows ``[T]`` -> the rows of the largest of all ranks."""


@torch.no_grad()
def top_token(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    first_row: int = 0,
    num_rows: int | None = None,
    choose: Choose | None = None,
) -> Tensor:
    """Return the row of ``weight`` with the largest logit for each token, the first of equal ones: ``[T]`` int64.

    A soft cap keeps the order of logits, so it is not needed here.

    Args:
        hidden: ``[T, h]``.
        weight: ``[V, h]``: rows ``first_row`` to ``first_row + V`` of the vocabulary.
        bias: ``[V]``.
        first_row, num_rows: as in :func:`linear_cross_entropy`.
        choose: for a weight that is divided over ranks.
    """
    size = weight.shape[0]
    real = max(0, min(size, (first_row + size if num_rows is None else num_rows) - first_row))
    largest = torch.full(hidden.shape[:1], -torch.inf, dtype=hidden.dtype, device=hidden.device)
    rows = torch.zeros_like(largest, dtype=torch.int64)
    chunk, _ = cut(len(hidden), size * hidden.element_size(), None, memory_of(hidden.device) * SHARE)
    # A rank may hold padding only; its largest logit stays minus infinity.
    for start in range(0, len(hidden) if real else 0, chunk):
        part = slice(start, start + chunk)
        largest[part], rows[part] = logits_of(hidden[part], weight, bias)[:, :real].max(-1)
    rows += first_row
    return rows if choose is None else choose(largest, rows)
