"""Divergence of two linear layers over chunks of tokens, so that only as many logits exist as fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalight.ops.common import once_differentiable, wide
from megalight.ops.cross_entropy import native
from megalight.ops.cross_entropy.chunked import SHARE, Combine, cut, memory_of
from megalight.ops.cross_entropy.products import logits_of, propagate
from megalight.ops.divergence.kinds import Kind

if TYPE_CHECKING:
    from megalight.ops.divergence import Projection


@dataclass(frozen=True)
class Plan:
    """The constants of one call; see the public function.

    Attributes:
        chunk: tokens per chunk.
        kept: number of chunks, the first ones, whose logits are kept.
        real: number of rows of the weights that are no padding.
        caps: soft caps of the student's and of the teacher's logits.
    """

    kind: Kind
    temperature: float
    own: bool
    chunk: int
    kept: int
    real: int
    caps: tuple[float | None, float | None]


def linear_divergence(
    student: Projection,
    teacher: Projection,
    labels: Tensor,
    kind: Kind,
    temperature: float,
    own: bool,
    chunk: int | None,
    first_row: int,
    real: int,
    combine: Combine | None,
) -> tuple[Tensor, Tensor | None]:
    """Implement the public function."""
    bytes_of_row = sum(side.weight.shape[0] * side.hidden.element_size() for side in (student, teacher))
    chunk, kept = cut(student.hidden.shape[0], bytes_of_row, chunk, memory_of(student.hidden.device) * SHARE)
    plan = Plan(kind, temperature, own, chunk, kept, real, (student.softcap, teacher.softcap))
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
        plan,
        combine,
    )
    return divergence, losses if own else None


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    logits = logits.to(wide(logits.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


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
        plan: Plan,
        combine: Combine | None,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        sides = (
            (_without(ignored, hidden), weight, bias),
            (_without(ignored, teacher), teacher_weight, teacher_bias),
        )
        # Rows: student, teacher, and the student at temperature 1, for its cross entropy.
        logsumexp = torch.full((3, tokens), -torch.inf, dtype=wide(hidden.dtype), device=hidden.device)
        logsumexp[2] = 0  # stays so if no cross entropy is wanted
        target = torch.zeros_like(logsumexp)
        kept: list[tuple[Tensor, Tensor]] = []
        for part in _parts(tokens, plan.chunk):
            logits = _both(sides, part)
            _statistics(logits, labels[part], logsumexp[:, part], target[0, part], plan)
            if len(kept) < plan.kept:
                kept.append(logits)
        # Two collectives for all chunks, not two for each: ranks with more memory may have fewer chunks.
        if combine is not None:
            logsumexp, target = combine(logsumexp, target)
        # Rows: the divergence, and the sum of its slopes.
        sums = torch.zeros_like(logsumexp[:2])
        for number, part in enumerate(_parts(tokens, plan.chunk)):
            logits = kept[number] if number < len(kept) else _both(sides, part)
            for block, log_p, log_q in _logs(logits, logsumexp[:, part], plan):
                terms, slopes = plan.kind(log_p, log_q)
                sums[0, part][block] = terms.sum(-1)
                sums[1, part][block] = slopes.sum(-1)
        if combine is not None:
            _, sums = combine(torch.zeros_like(sums), sums)
        # Keep parameters by reference: tensors that saved-tensor hooks return would not have their attributes.
        ctx.weights, ctx.plan, ctx.kept = (weight, bias, teacher_weight, teacher_bias), plan, kept
        ctx.save_for_backward(hidden, teacher, labels, ignored, logsumexp, sums[1])
        losses = (logsumexp[2] - target[0]) if plan.own else torch.zeros_like(sums[0])
        return sums[0].masked_fill(ignored, 0.0), losses.masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_own: Tensor) -> tuple[Tensor | None, ...]:
        hidden, teacher, labels, ignored, logsumexp, slopes = ctx.saved_tensors
        weight, bias, teacher_weight, teacher_bias = ctx.weights
        plan: Plan = ctx.plan
        kept, ctx.kept = ctx.kept, []  # they are overwritten below; a second backward computes them again
        hidden, teacher = _without(ignored, hidden), _without(ignored, teacher)
        sides = ((hidden, weight, bias), (teacher, teacher_weight, teacher_bias))
        # Zero also stops a NaN gradient of an ignored token from spreading into the weight gradient.
        grad, grad_own = grad.masked_fill(ignored, 0.0), grad_own.masked_fill(ignored, 0.0)

        def slopes_of_logits() -> Iterator[tuple[slice, Tensor]]:
            for part in _parts(hidden.shape[0], plan.chunk):
                logits = kept.pop(0) if kept else _both(sides, part)
                _gradient_(logits, labels[part], logsumexp[:, part], slopes[part], (grad[part], grad_own[part]), plan)
                yield part, logits[0]

        grads = propagate(hidden, weight, bias, ctx.needs_input_grad[:3], slopes_of_logits())
        return (*grads, *(None,) * 7)


def _without(ignored: Tensor, hidden: Tensor) -> Tensor:
    """Return ``hidden [T, h]`` with rows of zeros for ignored tokens."""
    # Padding may hold anything. 0 times a NaN is NaN, so a factor of 0 would not keep it from the weight's gradient.
    return hidden.masked_fill(ignored[:, None], 0)


def _parts(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, tokens, chunk)]


def _both(sides: Any, part: slice) -> tuple[Tensor, Tensor]:
    """Return the logits ``[chunk, V]`` of student and teacher."""
    student, teacher = (logits_of(hidden[part], weight, bias) for hidden, weight, bias in sides)
    return student, teacher


def _statistics(logits: tuple[Tensor, Tensor], labels: Tensor, logsumexp: Tensor, target: Tensor, plan: Plan) -> None:
    """Write the three rows of ``logsumexp [3, chunk]``, and the logits of the labels."""
    # Without real rows, this part of the vocabulary has probability 0: a log-sum-exp of -inf.
    for block in native.blocks(logits[0]) if plan.real else ():
        for place, (side, cap) in enumerate(zip(logits, plan.caps, strict=True)):
            logsumexp[place, block] = (_capped(side[block, : plan.real], cap) / plan.temperature).logsumexp(-1)
    if plan.own:
        logsumexp[2], target[:] = native.statistics(logits[0], labels, plan.real, plan.caps[0])


def _logs(logits: tuple[Tensor, Tensor], logsumexp: Tensor, plan: Plan) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks of rows with the log-probabilities of teacher and student at the temperature."""
    for block in native.blocks(logits[0]) if plan.real else ():
        student, teacher = (
            _capped(side[block, : plan.real], cap) / plan.temperature - logsumexp[place, block, None]
            for place, (side, cap) in enumerate(zip(logits, plan.caps, strict=True))
        )
        yield block, teacher, student


def _gradient_(
    logits: tuple[Tensor, Tensor],
    labels: Tensor,
    logsumexp: Tensor,
    slopes: Tensor,
    grads: tuple[Tensor, Tensor],
    plan: Plan,
) -> None:
    """Overwrite the student's logits with the gradient of ``sum(grads[0] * divergence + grads[1] * loss)``."""
    student, cap = logits[0], plan.caps[0]
    student[:, plan.real :] = 0
    for block, log_p, log_q in _logs(logits, logsumexp, plan):
        # log q = z / temperature - logsumexp, and the derivative of the log-sum-exp is q / temperature.
        slope = plan.kind(log_p, log_q)[1] - log_q.exp() * slopes[block, None]
        slope.mul_(grads[0][block, None] / plan.temperature)
        values = _capped(student[block, : plan.real], cap)
        if plan.own:
            factor = grads[1][block, None]
            slope += (values - logsumexp[2, block, None]).exp() * factor
            inside = (labels[block] >= 0) & (labels[block] < plan.real)
            columns = labels[block].clamp(0, plan.real - 1)[:, None]
            slope.scatter_add_(1, columns, -factor * inside[:, None])
        if cap is not None:
            slope.mul_(1 - (values / cap).square())
        student[block, : plan.real] = slope
