"""The row-wise parts of a divergence in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megalight.ops.common import wide
from megalight.ops.cross_entropy import native
from megalight.ops.divergence.kinds import KINDS
from megalight.ops.divergence.rows import Measure


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    logits = logits.to(wide(logits.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _logs(
    student: Tensor, teacher: Tensor, logsumexp: Tensor, measure: Measure
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks of rows with the log-probabilities of teacher and student at the temperature."""
    # Without real rows, this part of the vocabulary has probability 0.
    for block in native.blocks(student) if measure.real else ():
        log_q, log_p = (
            _capped(logits[block, : measure.real], cap) / measure.temperature - logsumexp[place, block, None]
            for place, (logits, cap) in enumerate(zip((student, teacher), measure.caps, strict=True))
        )
        yield block, log_p, log_q


def statistics(student: Tensor, teacher: Tensor, labels: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """See :class:`~megalight.ops.divergence.rows.Rows`."""
    logsumexp = torch.full((3, len(labels)), -torch.inf, dtype=wide(student.dtype), device=student.device)
    logsumexp[2] = 0
    target = torch.zeros_like(logsumexp[0])
    for block in native.blocks(student) if measure.real else ():
        for place, (logits, cap) in enumerate(zip((student, teacher), measure.caps, strict=True)):
            values = _capped(logits[block, : measure.real], cap) / measure.temperature
            logsumexp[place, block] = values.logsumexp(-1)
    if measure.own:
        logsumexp[2], target = native.statistics(student, labels, measure.real, measure.caps[0])
    return logsumexp, target


def sums(student: Tensor, teacher: Tensor, logsumexp: Tensor, measure: Measure) -> Tensor:
    """See :class:`~megalight.ops.divergence.rows.Rows`."""
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
    """See :class:`~megalight.ops.divergence.rows.Rows`."""
    real, cap = measure.real, measure.caps[0]
    student[:, real:] = 0
    for block, log_p, log_q in _logs(student, teacher, logsumexp, measure):
        # log q = z / temperature - logsumexp, and the derivative of the log-sum-exp is q / temperature.
        slope = KINDS[measure.kind](log_p, log_q)[1] - log_q.exp() * slopes[block, None]
        slope.mul_(grad[block, None] / measure.temperature)
        values = _capped(student[block, :real], cap)
        if measure.own:
            factor = grad_own[block, None]
            slope += (values - logsumexp[2, block, None]).exp() * factor
            inside = (labels[block] >= 0) & (labels[block] < real)
            columns = labels[block].clamp(0, real - 1)[:, None]
            slope.scatter_add_(1, columns, -factor * inside[:, None])
        if cap is not None:
            slope.mul_(1 - (values / cap).square())
        student[block, :real] = slope
