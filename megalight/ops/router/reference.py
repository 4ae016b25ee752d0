"""The MoE router in plain torch: how experts are scored and chosen, and the statistics of balance losses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.errors import nearest
from megalight.ops.common import wide

# How experts are scored and chosen, and what a router returns.


SCORES = ("softmax", "sigmoid")
"""Names of the score functions."""


@dataclass(frozen=True)
class Rule:
    """How experts are scored and chosen.

    Attributes:
        k: number of experts of a token.
        score: a name in :data:`SCORES`. Sigmoid scores of the chosen experts are divided by their sum if ``k > 1``.
        pre_softmax: softmax over all experts before the choice. Otherwise softmax over the ``k`` chosen logits.
        num_groups: divide the experts into as many groups of neighbors, and choose groups first
            (https://arxiv.org/abs/2412.19437). A group's score is the sum of its ``group_experts`` best scores.
        group_top_k: number of groups whose experts a token may choose.
        scale: factor of the probabilities.
        group_experts: see ``num_groups``. None: ``k // group_top_k``.
    """

    k: int
    score: str = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_top_k: int | None = None
    scale: float = 1.0
    group_experts: int | None = None

    def check(self, num_experts: int) -> None:
        """Raise ValueError if the rule is impossible with ``num_experts``."""
        if self.score not in SCORES:
            raise ValueError(
                f"unknown score function {self.score!r}; known: {', '.join(SCORES)}.{nearest(self.score, SCORES)}"
            )
        if not 1 <= self.k <= num_experts:
            raise ValueError(f"k={self.k} of {num_experts} experts cannot be chosen; set k from 1 to {num_experts}.")
        if (self.num_groups is None) != (self.group_top_k is None):
            raise ValueError(
                f"num_groups={self.num_groups} and group_top_k={self.group_top_k}; set both of them, or neither."
            )
        if self.num_groups is None or self.group_top_k is None:
            if self.group_experts is not None:
                raise ValueError(f"group_experts={self.group_experts} without groups; set num_groups, or leave it out.")
            return
        if self.num_groups < 1 or num_experts % self.num_groups:
            raise ValueError(f"{num_experts} experts do not divide into num_groups={self.num_groups}.")
        if not 1 <= self.group_top_k <= self.num_groups:
            raise ValueError(f"group_top_k={self.group_top_k} must be from 1 to num_groups={self.num_groups}.")
        size = num_experts // self.num_groups
        # Enough experts in the groups that may be chosen, and enough in each for its score.
        if self.k > self.group_top_k * size or (self.group_experts is None and self.best_of_group > size):
            raise ValueError(
                f"k={self.k} experts cannot come from group_top_k={self.group_top_k} groups of {size}; "
                "raise group_top_k or lower num_groups."
            )
        if self.group_experts is not None and not 1 <= self.group_experts <= size:
            raise ValueError(f"group_experts={self.group_experts} must be from 1 to {size}, the size of a group.")
        # A group's score would sum no expert.
        if self.best_of_group < 1:
            raise ValueError(
                f"group_top_k={self.group_top_k} is more than k={self.k}; lower it to {self.k}, or set group_experts."
            )

    @property
    def best_of_group(self) -> int:
        """Number of experts whose scores a group's score sums."""
        assert self.group_top_k is not None
        return self.k // self.group_top_k if self.group_experts is None else self.group_experts


class Routes(NamedTuple):
    """The experts of each token.

    Attributes:
        probs: ``[T, k]`` float32 (float64 for float64 logits), with gradient.
        experts: ``[T, k]`` int64, the best first.
    """

    probs: Tensor
    experts: Tensor


class Statistics(NamedTuple):
    """Sums over the tokens of each pool, all of one floating dtype.

    Attributes:
        scores: ``[S, E]``, sums of the normalized scores, with gradient.
        counts: ``[S, E]``, numbers of choices.
        squares: ``[S]``, sums of ``logsumexp(logits)^2``, with gradient: the z-loss (https://arxiv.org/abs/2202.08906).
    """

    scores: Tensor
    counts: Tensor
    squares: Tensor


EPS = 1e-20
"""Added to the sum of sigmoid scores that divides them."""


def best(scores: Tensor, k: int) -> Tensor:
    """Return the indices ``[..., k]`` of the largest scores; of equal ones, the lower index comes first."""
    # A stable sort, not `topk`, which promises no order of equal scores: all ranks and backends must choose alike.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def keep_groups(scores: Tensor, rule: Rule) -> Tensor:
    """Return the scores ``[T, E]`` with -inf for experts outside the ``group_top_k`` best groups."""
    assert rule.num_groups is not None
    assert rule.group_top_k is not None
    groups = scores.view(len(scores), rule.num_groups, scores.shape[1] // rule.num_groups)
    totals = groups.sort(dim=-1, descending=True).values[..., : rule.best_of_group].sum(-1)
    kept = torch.zeros_like(totals, dtype=torch.bool).scatter(-1, best(totals, rule.group_top_k), True)
    # minus infinity, not zero: biased scores may be negative
    return groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).view_as(scores)


def route(logits: Tensor, rule: Rule, bias: Tensor | None) -> Routes:
    """Implement :func:`megalight.ops.router.route`."""
    logits = logits.to(wide(logits.dtype))
    scores = logits
    if rule.score == "sigmoid":
        scores = logits.sigmoid()
    elif rule.pre_softmax:
        scores = logits.softmax(-1)
    # The choice has no gradient; the probabilities below have one. The bias steers the choice alone.
    choice = scores.detach() if bias is None else scores.detach() + bias.detach().to(scores.dtype)
    if rule.num_groups is not None:
        choice = keep_groups(choice, rule)
    experts = best(choice, rule.k)
    probs = scores.gather(-1, experts)
    if rule.score == "softmax" and not rule.pre_softmax:
        # Over the chosen ones alone, so that their weights sum to 1.
        probs = probs.softmax(-1)
    # With k = 1 the quotient would be 1, and the router would get no gradient.
    if rule.score == "sigmoid" and rule.k > 1:
        probs = probs / (probs.sum(-1, keepdim=True) + EPS)
    return Routes(probs * rule.scale, experts)


def statistics(logits: Tensor, rule: Rule, cu_seqlens: Tensor | None, mask: Tensor | None) -> Statistics:
    """Implement :func:`megalight.ops.router.statistics`."""
    logits = logits.to(wide(logits.dtype))
    if rule.score == "sigmoid":
        scores = logits.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + EPS)
    else:
        scores = logits.softmax(-1)
    # By logits: softmax and sigmoid keep their order.
    chosen = torch.zeros_like(logits).scatter(-1, best(logits.detach(), rule.k), 1.0)
    squares = logits.logsumexp(-1).square()
    if mask is not None:
        scores, chosen = (x.masked_fill(~mask.unsqueeze(-1), 0) for x in (scores, chosen))
        squares = squares.masked_fill(~mask, 0)
    bounds = [0, len(logits)] if cu_seqlens is None else cu_seqlens.tolist()
    sizes = [end - start for start, end in pairwise(bounds)]

    def sums(x: Tensor) -> Tensor:
        return torch.stack([part.sum(0) for part in torch.split(x, sizes)])

    return Statistics(sums(scores), sums(chosen), sums(squares))
