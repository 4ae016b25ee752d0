"""The row-wise parts of a divergence: each pass reads the logits of both models once, the last writes the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.cross_entropy.triton import capped, row_width
from megalight.ops.divergence.spec import Measure
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl

# One program walks a whole row of both models; blocks are wide so that few steps depend on each other.
ROW_BLOCK = 4096
# Here blocks are independent, so one row is spread over several programs.
GRADIENT_BLOCK = 2048


@jit
def _load(logits: Value, column: Value, width: Value, softcap: Value, CAPPED: constexpr) -> Value:
    x = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
    if CAPPED:
        x = capped(x, softcap)
    return x


@jit
def _grow(largest: Value, total: Value, x: Value) -> Value:
    # Online softmax: rescale the sum whenever the maximum grows.
    larger = tl.maximum(largest, tl.max(x, 0))
    return larger, total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)


@jit
def _kind(log_p: Value, log_q: Value, KIND: constexpr) -> Value:
    # Terms and slopes of `kinds.py`.
    if KIND == "forward_kl":
        p = tl.exp(log_p)
        terms, slopes = p * (log_p - log_q), -p
    elif KIND == "cross_entropy":
        p = tl.exp(log_p)
        terms, slopes = -p * log_q, -p
    elif KIND == "reverse_kl":
        q = tl.exp(log_q)
        terms = q * (log_q - log_p)
        slopes = terms + q
    else:
        tl.static_assert(KIND == "jensen_shannon")
        log_2: tl.constexpr = 0.6931471805599453
        log_m = tl.maximum(log_p, log_q) + tl.log(1.0 + tl.exp(-tl.abs(log_p - log_q))) - log_2
        slopes = 0.5 * tl.exp(log_q) * (log_q - log_m)
        terms = 0.5 * tl.exp(log_p) * (log_p - log_m) + slopes
    return terms, slopes


@jit
def _statistics(
    student: Value, teacher: Value, labels: Value, logsumexp: Value, target: Value, student_stride: Value,
    teacher_stride: Value,
    tokens: Value, width: Value, real: Value, scale: Value, student_cap: Value, teacher_cap: Value,
    STUDENT_CAPPED: constexpr, TEACHER_CAPPED: constexpr, OWN: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    student_largest = tl.full((), float("-inf"), tl.float32)
    student_total = tl.full((), 0.0, tl.float32)
    teacher_largest = tl.full((), float("-inf"), tl.float32)
    teacher_total = tl.full((), 0.0, tl.float32)
    own_total = tl.full((), 0.0, tl.float32)
    for start in range(0, real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        # After caps: capping -inf would give a real probability.
        z = tl.where(column < real, _load(student, column, width, student_cap, STUDENT_CAPPED), float("-inf"))
        x = tl.where(column < real, _load(teacher, column, width, teacher_cap, TEACHER_CAPPED), float("-inf"))
        teacher_largest, teacher_total = _grow(teacher_largest, teacher_total, x * scale)
        # One maximum of the student's logits serves both temperatures.
        larger = tl.maximum(student_largest, tl.max(z, 0))
        shrink = student_largest - larger
        student_total = student_total * tl.exp(shrink * scale) + tl.sum(tl.exp((z - larger) * scale), 0)
        if OWN:
            own_total = own_total * tl.exp(shrink) + tl.sum(tl.exp(z - larger), 0)
        student_largest = larger
    tl.store(logsumexp + row, student_largest * scale + tl.log(student_total))
    tl.store(logsumexp + tokens + row, teacher_largest + tl.log(teacher_total))
    value = tl.full((), 0.0, tl.float32)
    own_sum = tl.full((), 0.0, tl.float32)
    if OWN:
        own_sum = student_largest + tl.log(own_total)
        # The label's logit is read directly instead of searched for in every block.
        label = tl.load(labels + row)
        inside = (label >= 0) & (label < real)
        value = tl.load(student + label, mask=inside, other=0.0).to(tl.float32)
        if STUDENT_CAPPED:
            value = capped(value, student_cap)
    tl.store(logsumexp + 2 * tokens + row, own_sum)
    tl.store(target + row, value)


@jit
def _sums(
    student: Value, teacher: Value, logsumexp: Value, found: Value, student_stride: Value, teacher_stride: Value,
    logsumexp_stride: Value,
    tokens: Value, width: Value, real: Value, scale: Value, student_cap: Value, teacher_cap: Value,
    STUDENT_CAPPED: constexpr, TEACHER_CAPPED: constexpr, KIND: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    student_sum = tl.load(logsumexp + row)
    teacher_sum = tl.load(logsumexp + logsumexp_stride + row)
    # Summed at the end: one reduction of a row, not one of each block.
    terms = tl.zeros((BLOCK,), tl.float32)
    slopes = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        log_q = _load(student, column, width, student_cap, STUDENT_CAPPED) * scale - student_sum
        log_p = _load(teacher, column, width, teacher_cap, TEACHER_CAPPED) * scale - teacher_sum
        term, slope = _kind(log_p, log_q, KIND)
        terms += tl.where(column < real, term, 0.0)
        slopes += tl.where(column < real, slope, 0.0)
    tl.store(found + row, tl.sum(terms, 0))
    tl.store(found + tokens + row, tl.sum(slopes, 0))


@jit
def _gradient(
    student: Value, teacher: Value, labels: Value, logsumexp: Value, slopes: Value, grad: Value, grad_own: Value,
    student_stride: Value, teacher_stride: Value, logsumexp_stride: Value,
    width: Value, real: Value, scale: Value, student_cap: Value, teacher_cap: Value,
    STUDENT_CAPPED: constexpr, TEACHER_CAPPED: constexpr, OWN: constexpr, KIND: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    student += row * student_stride
    teacher += row * teacher_stride
    z = _load(student, column, width, student_cap, STUDENT_CAPPED)
    log_q = z * scale - tl.load(logsumexp + row)
    log_p = _load(teacher, column, width, teacher_cap, TEACHER_CAPPED) * scale - tl.load(
        logsumexp + logsumexp_stride + row
    )
    # log q = z * scale - logsumexp, and the derivative of the log-sum-exp is q * scale.
    _term, slope = _kind(log_p, log_q, KIND)
    slope = (slope - tl.exp(log_q) * tl.load(slopes + row)) * (tl.load(grad + row) * scale)
    if OWN:
        softmax = tl.exp(z - tl.load(logsumexp + 2 * logsumexp_stride + row))
        slope += (softmax - tl.where(column == tl.load(labels + row), 1.0, 0.0)) * tl.load(grad_own + row)
    if STUDENT_CAPPED:
        slope *= 1.0 - (z / student_cap) * (z / student_cap)
    # A select, not a product: exp() of arbitrary padding may be infinite, and 0 * inf is NaN.
    slope = tl.where(column < real, slope, 0.0)
    tl.store(student + column, slope.to(student.dtype.element_ty), mask=column < width)


def _options(measure: Measure, block: int) -> dict[str, Any]:
    student, teacher = measure.caps
    return {
        "scale": 1 / measure.temperature,
        "student_cap": 1.0 if student is None else student,
        "teacher_cap": 1.0 if teacher is None else teacher,
        "STUDENT_CAPPED": student is not None,
        "TEACHER_CAPPED": teacher is not None,
        "BLOCK": block,
        "num_warps": max(4, block // 256),
    }


def _both_widths(student: Tensor, teacher: Tensor, columns: int) -> int:
    return min(row_width(student, columns), row_width(teacher, columns))


def statistics(student: Tensor, teacher: Tensor, labels: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """See :class:`~megalight.ops.divergence.spec.DivergenceKernels`."""
    tokens = student.shape[0]
    logsumexp = torch.empty(3, tokens, dtype=torch.float32, device=student.device)
    target = torch.empty_like(logsumexp[0])
    _statistics[(tokens,)](
        student, teacher, labels, logsumexp, target, student.stride(0), teacher.stride(0), tokens,
        _both_widths(student, teacher, measure.real), measure.real,
        OWN=measure.own, **_options(measure, min(ROW_BLOCK, next_power(max(measure.real, 16)))),
    )  # fmt: skip
    return logsumexp, target


def sums(student: Tensor, teacher: Tensor, logsumexp: Tensor, measure: Measure) -> Tensor:
    """See :class:`~megalight.ops.divergence.spec.DivergenceKernels`."""
    tokens = student.shape[0]
    found = torch.empty(2, tokens, dtype=torch.float32, device=student.device)
    _sums[(tokens,)](
        student, teacher, logsumexp, found, student.stride(0), teacher.stride(0), logsumexp.stride(0), tokens,
        _both_widths(student, teacher, measure.real), measure.real,
        KIND=measure.kind, **_options(measure, min(ROW_BLOCK, next_power(max(measure.real, 16)))),
    )  # fmt: skip
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
    """See :class:`~megalight.ops.divergence.spec.DivergenceKernels`. Padding between rows may be overwritten."""
    tokens, size = student.shape
    block = min(GRADIENT_BLOCK, next_power(size))
    _gradient[(tokens, cdiv(size, block))](
        student, teacher, labels, logsumexp, slopes, grad, grad_own, student.stride(0), teacher.stride(0),
        logsumexp.stride(0), _both_widths(student, teacher, size), measure.real,
        OWN=measure.own, KIND=measure.kind, **_options(measure, block),
    )  # fmt: skip
