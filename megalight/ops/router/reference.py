"""The router in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from megalight.ops.common import wide
from megalight.ops.router.rule import Routes, Rule, Statistics

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
