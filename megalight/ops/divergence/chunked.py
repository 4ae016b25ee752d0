"""Divergence of two linear layers over chunks of tokens, so that only as many logits exist as fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalight.ops import cross_entropy
from megalight.ops.autograd import once_differentiable
from megalight.ops.common import wide
from megalight.ops.cross_entropy import SHARE, Combine, cut, logits_of, memory_of, propagate
from megalight.ops.divergence.spec import KINDS, DivergenceKernels, Measure, Projection


def _logs(
    student: Tensor, teacher: Tensor, logsumexp: Tensor, measure: Measure
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks of rows with the log-probabilities of teacher and student at the temperature."""
    # Without real rows, this part of the vocabulary has probability 0.
    for block in cross_entropy.blocks(student) if measure.real else ():
        log_q, log_p = (
            cross_entropy.capped(logits[block, : measure.real], cap) / measure.temperature
            - logsumexp[place, block, None]
            for place, (logits, cap) in enumerate(zip((student, teacher), measure.caps, strict=True))
        )
        yield block, log_p, log_q


def statistics(student: Tensor, teacher: Tensor, labels: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """See :class:`~megalight.ops.divergence.spec.DivergenceKernels`."""
    logsumexp = torch.full((3, len(labels)), -torch.inf, dtype=wide(student.dtype), device=student.device)
    logsumexp[2] = 0
    target = torch.zeros_like(logsumexp[0])
    for block in cross_entropy.blocks(student) if measure.real else ():
        for place, (logits, cap) in enumerate(zip((student, teacher), measure.caps, strict=True)):
            values = cross_entropy.capped(logits[block, : measure.real], cap) / measure.temperature
            logsumexp[place, block] = values.logsumexp(-1)
    if measure.own:
        logsumexp[2], target = cross_entropy.statistics(student, labels, measure.real, measure.caps[0])
    return logsumexp, target


def sums(student: Tensor, teacher: Tensor, logsumexp: Tensor, measure: Measure) -> Tensor:
    """See :class:`~megalight.ops.divergence.spec.DivergenceKernels`."""
    found = torch.zeros_like(logsumexp[:2])
    for block, log_p, log_q in _logs(student, teacher, logsumexp, measure):
        terms, slopes = KINDS[measure.kind](log_p, log_q)
        found[0, block], found[1, block] = terms.sum(-1), slopes.sum(-1)
    return found


def gradient_(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    slopes: Tensor,
    grad: Tensor,
    grad_own: Tensor,
    measure: Measure,
) -> None:
    """See :class:`~megalight.ops.divergence.spec.DivergenceKernels`."""
    real, cap = measure.real, measure.caps[0]
    student[:, real:] = 0
    for block, log_p, log_q in _logs(student, teacher, logsumexp, measure):
        # log q = z / temperature - logsumexp, and the derivative of the log-sum-exp is q / temperature.
        slope = KINDS[measure.kind](log_p, log_q)[1] - log_q.exp() * slopes[block, None]
        slope.mul_(grad[block, None] / measure.temperature)
        values = cross_entropy.capped(student[block, :real], cap)
        if measure.own:
            factor = grad_own[block, None]
            slope += (values - logsumexp[2, block, None]).exp() * factor
            inside = (labels[block] >= 0) & (labels[block] < real)
            columns = labels[block].clamp(0, real - 1)[:, None]
            slope.scatter_add_(1, columns, -factor * inside[:, None])
        if cap is not None:
            slope.mul_(1 - (values / cap).square())
        student[block, :real] = slope


@dataclass(frozen=True)
class DivergenceConstants:
    """The constants of one call; see the public function.

    Attributes:
        rows: the row-wise kernels.
        measure: what they compute.
        chunk: tokens per chunk.
        kept: number of chunks, the first ones, whose logits are kept.
    """

    rows: DivergenceKernels
    measure: Measure
    chunk: int
    kept: int


def linear_divergence(
    rows: DivergenceKernels,
    student: Projection,
    teacher: Projection,
    labels: Tensor,
    measure: Measure,
    chunk: int | None,
    first_row: int,
    combine: Combine | None,
) -> tuple[Tensor, Tensor | None]:
    """Implement the public function with the row-wise kernels of a backend."""
    bytes_of_row = sum(side.weight.shape[0] * side.hidden.element_size() for side in (student, teacher))
    chunk, kept = cut(student.hidden.shape[0], bytes_of_row, chunk, memory_of(student.hidden.device) * SHARE)
    local = labels if first_row == 0 else (labels - first_row).where(labels >= 0, labels)
    divergence, losses = _LinearDivergence.apply(  # type: ignore[no-untyped-call]
        student.hidden,
        student.weight,
        student.bias,
        teacher.hidden,
        teacher.weight,
        teacher.bias,
        local,
        labels < 0,
        DivergenceConstants(rows, measure, chunk, kept),
        combine,
    )
    return divergence, losses if measure.own else None


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        labels: Tensor,
        ignored: Tensor,
        plan: DivergenceConstants,
        combine: Combine | None,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        sides = (
            (_without(ignored, hidden), weight, bias),
            (_without(ignored, teacher), teacher_weight, teacher_bias),
        )
        logsumexp = torch.empty(3, tokens, dtype=wide(hidden.dtype), device=hidden.device)
        target = torch.zeros_like(logsumexp)  # like the sums, for `combine`; the first row is used
        kept: list[tuple[Tensor, Tensor]] = []
        for part in parts_of(tokens, plan.chunk):
            logits = _both(sides, part)
            logsumexp[:, part], target[0, part] = plan.rows.statistics(*logits, labels[part], plan.measure)
            if len(kept) < plan.kept:
                kept.append(logits)
        # Two collectives for all chunks, not two for each: ranks with more memory may have fewer chunks.
        if combine is not None:
            logsumexp, target = combine(logsumexp, target)
        # Rows: the divergence, and the sum of its slopes.
        sums = torch.empty_like(logsumexp[:2])
        for number, part in enumerate(parts_of(tokens, plan.chunk)):
            logits = kept[number] if number < len(kept) else _both(sides, part)
            sums[:, part] = plan.rows.sums(*logits, logsumexp[:, part], plan.measure)
        if combine is not None:
            _, sums = combine(torch.zeros_like(sums), sums)
        # Keep parameters by reference: tensors that saved-tensor hooks return would not have their attributes.
        ctx.weights, ctx.plan, ctx.kept = (weight, bias, teacher_weight, teacher_bias), plan, kept
        ctx.save_for_backward(hidden, teacher, labels, ignored, logsumexp, sums[1])
        losses = (logsumexp[2] - target[0]) if plan.measure.own else torch.zeros_like(sums[0])
        return sums[0].masked_fill(ignored, 0.0), losses.masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_own: Tensor) -> tuple[Tensor | None, ...]:
        hidden, teacher, labels, ignored, logsumexp, slopes = ctx.saved_tensors
        weight, bias, teacher_weight, teacher_bias = ctx.weights
        plan: DivergenceConstants = ctx.plan
        kept, ctx.kept = ctx.kept, []  # they are overwritten below; a second backward computes them again
        hidden, teacher = _without(ignored, hidden), _without(ignored, teacher)
        sides = ((hidden, weight, bias), (teacher, teacher_weight, teacher_bias))
        # Zero also stops a NaN gradient of an ignored token from spreading into the weight gradient.
        # The gradient of a sum is an expanded scalar.
        grad, grad_own = (given.masked_fill(ignored, 0.0).contiguous() for given in (grad, grad_own))

        def slopes_of_logits() -> Iterator[tuple[slice, Tensor]]:
            for part in parts_of(hidden.shape[0], plan.chunk):
                # In place: from here on `student` holds the gradient of the student's logits.
                student, teachers = kept.pop(0) if kept else _both(sides, part)
                of_part = logsumexp[:, part], slopes[part], grad[part], grad_own[part]
                plan.rows.gradient_(student, teachers, labels[part], *of_part, plan.measure)
                yield part, student

        grads = propagate(hidden, weight, bias, ctx.needs_input_grad[:3], slopes_of_logits())
        return (*grads, *(None,) * 7)


def _without(ignored: Tensor, hidden: Tensor) -> Tensor:
    """Return ``hidden [T, h]`` with rows of zeros for ignored tokens."""
    # Padding may hold anything. 0 times a NaN is NaN, so a factor of 0 would not keep it from the weight's gradient.
    return hidden.masked_fill(ignored[:, None], 0)


def parts_of(tokens: int, chunk: int) -> list[slice]:
    """Return the chunks of the tokens."""
    return [slice(start, start + chunk) for start in range(0, tokens, chunk)]


def _both(sides: Any, part: slice) -> tuple[Tensor, Tensor]:
    """Return the logits ``[chunk, V]`` of student and teacher."""
    student, teacher = (logits_of(hidden[part], weight, bias) for hidden, weight, bias in sides)
    return student, teacher
