"""Divergences of a student's distribution ``q`` from a teacher's ``p``, term by term."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

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
