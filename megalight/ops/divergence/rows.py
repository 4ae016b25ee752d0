"""What a backend of the divergence computes, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


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
class Rows:
    """The row-wise kernels of a backend. Logits are ``[T, V]``; labels outside ``[0, real)`` are in another part.

    Attributes:
        statistics: ``(student, teacher, labels, measure) -> logsumexp [3, T], target [T]``. Rows of ``logsumexp``:
            the student and the teacher at the temperature, and the student at temperature 1, which is 0 if its cross
            entropy is not wanted. ``target``: the student's logits of the labels, or 0.
        sums: ``(student, teacher, logsumexp [3, T], measure) -> [2, T]``: the sums of the terms and of the slopes of
            :mod:`~megalight.ops.divergence.kinds`.
        gradient_: ``(student, teacher, labels, logsumexp, slopes [T], grad [T], grad_own [T], measure)`` overwrites
            the student's logits with the gradient of ``sum(grad * divergence + grad_own * cross_entropy)``. ``slopes``
            is the second row of ``sums``.
    """

    statistics: Callable[[Tensor, Tensor, Tensor, Measure], tuple[Tensor, Tensor]]
    sums: Callable[[Tensor, Tensor, Tensor, Measure], Tensor]
    gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Measure], None]
