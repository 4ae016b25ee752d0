"""Divergence of a linear layer from the most likely tokens of a teacher, over chunks of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalight.ops import cross_entropy
from megalight.ops.autograd import once_differentiable
from megalight.ops.common import wide
from megalight.ops.cross_entropy import SHARE, Combine, cut, logits_of, memory_of, propagate, statistics
from megalight.ops.divergence.chunked import parts_of
from megalight.ops.divergence.spec import Projection
from megalight.types import TopTokens

NOTHING = -1e30
"""Stands for a log-sum-exp of ``-inf``: finite, so that a probability of 0 times it is 0."""


@dataclass(frozen=True)
class TopKConstants:
    """The constants of one call; see the public function.

    Attributes:
        chunk: tokens per chunk.
        kept: number of chunks, the first ones, whose logits are kept.
        real: number of rows of the weight that are no padding.
        first_row: of this part of the vocabulary.
        softcap: of the student's logits.
        entropy: whether the divergence includes the teacher's negative entropy.
    """

    temperature: float
    own: bool
    chunk: int
    kept: int
    real: int
    first_row: int
    softcap: float | None
    entropy: bool


def top_divergence(
    student: Projection,
    teacher: TopTokens,
    labels: Tensor,
    temperature: float,
    own: bool,
    chunk: int | None,
    first_row: int,
    real: int,
    combine: Combine | None,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Implement :func:`megalight.ops.divergence.linear_divergence` for ``[T, K]`` stored tokens."""
    bytes_of_row = student.weight.shape[0] * student.hidden.element_size()
    chunk, kept = cut(student.hidden.shape[0], bytes_of_row, chunk, memory_of(student.hidden.device) * SHARE)
    plan = TopKConstants(temperature, own, chunk, kept, real, first_row, student.softcap, entropy)
    # Logarithms on disk are rounded. Divided by their sum, they are a distribution again.
    logs = torch.cat([teacher.log_probs, teacher.log_rest[:, None]], 1).to(wide(student.hidden.dtype)).log_softmax(1)
    divergence, losses = _TopDivergence.apply(  # type: ignore[no-untyped-call]
        student.hidden, student.weight, student.bias, teacher.ids, logs, labels, plan, combine
    )
    return divergence, losses if own else None


class _TopDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        logs: Tensor,
        labels: Tensor,
        plan: TopKConstants,
        combine: Combine | None,
    ) -> tuple[Tensor, Tensor]:
        tokens, ignored = hidden.shape[0], labels < 0
        # Padding may hold anything, and 0 times a NaN is NaN.
        rows = hidden.masked_fill(ignored[:, None], 0)
        logs = logs.masked_fill(ignored[:, None], -torch.inf)
        probs = logs.exp()
        # Rows: all tokens, those in the bucket, and all at temperature 1, for the cross entropy.
        logsumexp = torch.full((3, tokens), -torch.inf, dtype=logs.dtype, device=hidden.device)
        logsumexp[1] = NOTHING
        if not plan.own:
            logsumexp[2] = 0
        target = torch.zeros_like(logsumexp)
        kept: list[Tensor] = []
        for part in parts_of(tokens, plan.chunk):
            logits = logits_of(rows[part], weight, bias)
            for block, values in _blocks(logits, plan):
                here = slice(part.start + block.start, part.start + block.start + len(values))
                columns, inside = _columns(ids[here], plan)
                logsumexp[0, here] = values.logsumexp(-1)
                logsumexp[1, here] = _bucket(values, columns, inside).logsumexp(-1).clamp(min=NOTHING)
                target[0, here] = (values.gather(1, columns) * (probs[here, :-1] * inside)).sum(-1)
            if plan.own:
                local = (labels[part] - plan.first_row).where(labels[part] >= 0, labels[part])
                logsumexp[2, part], target[2, part] = statistics(logits, local, plan.real, plan.softcap)
            if len(kept) < plan.kept:
                kept.append(logits)
        # One collective for all chunks: ranks with more memory may have fewer chunks.
        if combine is not None:
            logsumexp, target = combine(logsumexp, target)
        # sum p log q, with log q = z - logsumexp, and for the bucket the difference of both logsumexp.
        rest = probs[:, -1]
        divergence = logsumexp[0] - target[0] - rest * logsumexp[1]
        if plan.entropy:
            divergence = divergence + torch.xlogy(probs, probs).sum(-1)
        # Keep parameters by reference: tensors that saved-tensor hooks return would not have their attributes.
        ctx.weights, ctx.plan, ctx.kept = (weight, bias), plan, kept
        ctx.save_for_backward(hidden, ids, probs, labels, logsumexp)
        losses = (logsumexp[2] - target[2]) if plan.own else torch.zeros_like(divergence)
        return divergence.masked_fill(ignored, 0.0), losses.masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_own: Tensor) -> tuple[Tensor | None, ...]:
        hidden, ids, probs, labels, logsumexp = ctx.saved_tensors
        weight, bias = ctx.weights
        plan: TopKConstants = ctx.plan
        kept, ctx.kept = ctx.kept, []  # they are overwritten below; a second backward computes them again
        ignored = labels < 0
        hidden = hidden.masked_fill(ignored[:, None], 0)
        # Zero also stops a NaN gradient of an ignored token from spreading into the weight gradient.
        grad, grad_own = grad.masked_fill(ignored, 0.0), grad_own.masked_fill(ignored, 0.0)

        def slopes() -> Iterator[tuple[slice, Tensor]]:
            for part in parts_of(hidden.shape[0], plan.chunk):
                logits = kept.pop(0) if kept else logits_of(hidden[part], weight, bias)
                given = ids[part], probs[part], labels[part], logsumexp[:, part], grad[part], grad_own[part]
                _gradient_(logits, *given, plan)
                yield part, logits

        grads = propagate(hidden, weight, bias, ctx.needs_input_grad[:3], slopes())
        return (*grads, *(None,) * 5)


def _blocks(logits: Tensor, plan: TopKConstants) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows with the student's logits at the temperature."""
    # Without real rows, this part of the vocabulary has probability 0.
    for block in cross_entropy.blocks(logits) if plan.real else ():
        yield block, cross_entropy.capped(logits[block, : plan.real], plan.softcap) / plan.temperature


def _columns(ids: Tensor, plan: TopKConstants) -> tuple[Tensor, Tensor]:
    """Return the columns of ids in this part of the vocabulary, and which ids lie in it; the others have any column."""
    local = ids.long() - plan.first_row
    return local.clamp(0, plan.real - 1), (local >= 0) & (local < plan.real)


def _bucket(values: Tensor, columns: Tensor, inside: Tensor) -> Tensor:
    """Return the logits of the bucket's tokens; those of the teacher's tokens become ``-inf``."""
    # The smallest of both: an id of another part must not bring back a column that another id has taken out.
    taken = torch.where(inside, -torch.inf, torch.inf).to(values.dtype)
    return values.scatter_reduce(1, columns, taken, "amin")


def _gradient_(
    logits: Tensor,
    ids: Tensor,
    probs: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    grad: Tensor,
    grad_own: Tensor,
    plan: TopKConstants,
) -> None:
    """Overwrite the logits with the gradient of ``sum(grad * divergence + grad_own * loss)``."""
    logits[:, plan.real :] = 0
    for block, values in _blocks(logits, plan):
        columns, inside = _columns(ids[block], plan)
        # Of q: softmax - p for the teacher's tokens, and for the bucket its share within the bucket instead of p.
        bucket = (_bucket(values, columns, inside) - logsumexp[1, block, None]).exp()
        slope = (values - logsumexp[0, block, None]).exp() - bucket * probs[block, -1:]
        slope.scatter_add_(1, columns, -probs[block, :-1] * inside)
        slope.mul_(grad[block, None] / plan.temperature)
        values = values * plan.temperature
        if plan.own:
            factor = grad_own[block, None]
            slope += (values - logsumexp[2, block, None]).exp() * factor
            column, here = _columns(labels[block, None], plan)
            slope.scatter_add_(1, column, -factor * here)
        if plan.softcap is not None:
            slope.mul_(1 - (values / plan.softcap).square())
        logits[block, : plan.real] = slope
