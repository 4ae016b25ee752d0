"""Divergences of a student's distribution ``q`` from a teacher's ``p``, term by term, and what a backend computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(log p, log q) -> (terms, slopes)``, one for each element.

The divergence is the sum of the terms over the vocabulary. Slopes are its derivatives by ``log q``, as if its elements
were independent.
"""


def forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """``KL(p | q) = sum p (log p - log q)``: the student covers everything that the teacher finds likely."""
    p = log_p.exp()
    return p * (log_p - log_q), -p


def cross_entropy(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """``-sum p log q``: :func:`forward_kl` and the teacher's entropy, which has no gradient."""
    p = log_p.exp()
    return -p * log_q, -p


def reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """``KL(q | p) = sum q (log q - log p)``: the student avoids what the teacher finds unlikely."""
    q = log_q.exp()
    terms = q * (log_q - log_p)
    return terms, terms + q


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """``(KL(p | m) + KL(q | m)) / 2`` with ``m = (p + q) / 2``: symmetric, at most ``log 2``."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    slopes = log_q.exp() * (log_q - log_m) / 2
    return log_p.exp() * (log_p - log_m) / 2 + slopes, slopes


KINDS: dict[str, Kind] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "cross_entropy": cross_entropy,
}
"""Name -> divergence."""


class Projection(NamedTuple):
    """Logits that are not computed yet: ``softcap * tanh((hidden W^T + b) / softcap)``.

    Attributes:
        hidden: ``[T, h]``; teacher and student may have different ``h``.
        weight: ``[V, h]``: rows ``first_row`` to ``first_row + V`` of the vocabulary.
        bias: ``[V]``.
        softcap: None: no cap.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Measure:
    """What is measured on rows of logits.

    Attributes:
        kind: name of the divergence.
        temperature: divides the logits of both models for it.
        own: whether the student's cross entropy is wanted, too.
        real: number of columns that are no padding.
        caps: soft caps of the student's and of the teacher's logits.
    """

    kind: str
    temperature: float
    own: bool
    real: int
    caps: tuple[float | None, float | None]


@dataclass(frozen=True)
class DivergenceKernels:
    """The row-wise kernels of a backend. Logits are ``[T, V]``; labels outside ``[0, real)`` are in another part.

    Attributes:
        statistics: ``(student, teacher, labels, measure) -> logsumexp [3, T], target [T]``. Rows of ``logsumexp``:
            the student and the teacher at the temperature, and the student at temperature 1, which is 0 if its cross
            entropy is not wanted. ``target``: the student's logits of the labels, or 0.
        sums: ``(student, teacher, logsumexp [3, T], measure) -> [2, T]``: the sums of the terms and of the slopes of
            :mod:`~megalight.ops.divergence.spec`.
        gradient_: ``(student, teacher, labels, logsumexp, slopes [T], grad [T], grad_own [T], measure)`` overwrites
            the student's logits with the gradient of ``sum(grad * divergence + grad_own * cross_entropy)``. ``slopes``
            is the second row of ``sums``.
    """

    statistics: Callable[[Tensor, Tensor, Tensor, Measure], tuple[Tensor, Tensor]]
    sums: Callable[[Tensor, Tensor, Tensor, Measure], Tensor]
    gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Measure], None]
