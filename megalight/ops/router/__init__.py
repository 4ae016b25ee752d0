"""The choice of experts by logits, and the statistics that balance losses need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.errors import nearest
from megalight.ops.common import lazy, serve_all, triton_why_not, wide
from megalight.registry import Backend, BackendRegistry, choose

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


def reference_route(logits: Tensor, rule: Rule, bias: Tensor | None) -> Routes:
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


def reference_statistics(logits: Tensor, rule: Rule, cu_seqlens: Tensor | None, mask: Tensor | None) -> Statistics:
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


class RouterSpec(NamedTuple):
    """A request to a router: device type, dtype of the logits, number of experts, number of groups of experts."""

    device: str
    dtype: torch.dtype
    num_experts: int
    num_groups: int


ROUTE: BackendRegistry[RouterSpec, Callable[[Tensor, Rule, Tensor | None], Routes]] = BackendRegistry("route")
STATISTICS: BackendRegistry[RouterSpec, Callable[..., Statistics]] = BackendRegistry("router_statistics")
REGISTRIES: tuple[BackendRegistry[RouterSpec, Any], ...] = (ROUTE, STATISTICS)
MOST_EXPERTS = 1024
EXAMPLE = RouterSpec("cpu", torch.float32, 128, 1)


def _triton_why_not(spec: RouterSpec) -> str | None:
    if spec.num_experts > MOST_EXPERTS:
        return f"serves at most {MOST_EXPERTS} experts, not {spec.num_experts}"
    # The kernel views a row of experts as groups, and its tiles have powers of two as sizes.
    if spec.num_groups > 1 and any(n & (n - 1) for n in (spec.num_experts, spec.num_groups)):
        return f"needs powers of two to choose groups, not {spec.num_experts} experts in {spec.num_groups} groups"
    return triton_why_not(spec.device, spec.dtype)


_TRITON = "megalight.ops.router.triton"
ROUTE.register(Backend("triton", lazy(_TRITON, "route"), 20, _triton_why_not))
STATISTICS.register(Backend("triton", lazy(_TRITON, "statistics"), 20, _triton_why_not))
ROUTE.register(Backend("reference", reference_route, 0, serve_all))
STATISTICS.register(Backend("reference", reference_statistics, 0, serve_all))


def route(logits: Tensor, rule: Rule, bias: Tensor | None = None, backend: str = "auto") -> Routes:
    """Choose ``rule.k`` experts for each token. Of equal scores, the expert with the lower index is chosen.

    Nothing here waits for the device. Half-precision logits are computed in float32.

    Args:
        logits: ``[T, E]``.
        rule: how experts are scored and chosen.
        bias: ``[E]``, added to the scores for the choice alone, not for the probabilities
            (https://arxiv.org/abs/2408.15664). It gets no gradient.

    Raises:
        ValueError: the rule does not fit ``E`` experts, or a bias is given with softmax after the choice.
    """
    rule.check(logits.shape[1])
    if bias is not None and rule.score == "softmax" and not rule.pre_softmax:
        raise ValueError("a bias of the choice needs scores: use sigmoid, or softmax with pre_softmax=True.")
    spec = RouterSpec(logits.device.type, logits.dtype, logits.shape[1], rule.num_groups or 1)
    routes: Routes = choose(ROUTE, spec, backend)(logits, rule, bias)
    return routes


def statistics(
    logits: Tensor,
    k: int,
    score: str = "softmax",
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Statistics:
    """Sum scores, choices and squared log-sums over pools of tokens, for losses that balance experts.

    The choice is the plain top-k of the scores: without bias, groups, capacity and padding. The scores are normalized
    over all experts: softmax, or sigmoid divided by its sum. Sums are in float32 (float64 for float64 logits), and the
    same for every run.

    Args:
        logits: ``[T, E]``.
        k: number of experts that a token chooses.
        score: a name in :data:`SCORES`.
        cu_seqlens: ``[S + 1]`` integers on the device: where the ``S`` pools begin, then ``T``. None: one pool.
        mask: ``[T]`` bool; tokens with False (padding) do not count.

    Raises:
        ValueError: the score is unknown, or ``k`` is more than ``E``.
    """
    # Without bias and groups: balance is measured by what the router wants, not by what it may do.
    rule = Rule(k, score)
    rule.check(logits.shape[1])
    spec = RouterSpec(logits.device.type, logits.dtype, logits.shape[1], 1)
    found: Statistics = choose(STATISTICS, spec, backend)(logits, rule, cu_seqlens, mask)
    return found
