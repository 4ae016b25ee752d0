from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalight.ops.router import Rule, route, statistics
from tests.ops.checks import error
from tests.ops.moe_checks import RULES

INFINITY = float("inf")


def loop(logits: Tensor, rule: Rule, bias: Tensor | None) -> tuple[Tensor, list[list[int]]]:
    """One token after the other, in Python's own words."""
    probs, experts = [], []
    for row in logits:
        if rule.score == "sigmoid":
            scores = 1 / (1 + (-row).exp())
        else:
            scores = row.exp() / row.exp().sum() if rule.pre_softmax else row
        choice = [float(s.detach()) + (0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        allowed = list(range(len(choice)))
        if rule.num_groups is not None and rule.group_top_k is not None:
            size = len(choice) // rule.num_groups
            groups = [allowed[g * size : (g + 1) * size] for g in range(rule.num_groups)]
            count = rule.group_experts or rule.k // rule.group_top_k
            totals = [sum(sorted((choice[e] for e in group), reverse=True)[:count]) for group in groups]
            kept = sorted(range(rule.num_groups), key=lambda g: -totals[g])[: rule.group_top_k]
            allowed = sorted(e for g in kept for e in groups[g])
        chosen = sorted(allowed, key=lambda e: -choice[e])[: rule.k]
        p = scores[torch.tensor(chosen)]
        if rule.score == "softmax" and not rule.pre_softmax:
            p = p.exp() / p.exp().sum()
        if rule.score == "sigmoid" and rule.k > 1:
            p = p / p.sum()
        probs.append(p * rule.scale)
        experts.append(chosen)
    return torch.stack(probs), experts


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_route_equals_a_loop(rule: Rule, biased: bool) -> None:
    if biased and rule.score == "softmax" and not rule.pre_softmax:
        with pytest.raises(ValueError, match="pre_softmax=True"):
            route(torch.zeros(2, 16), rule, torch.zeros(16))
        return
    logits = (2 * torch.randn(13, 16, dtype=torch.float64)).requires_grad_()
    bias = torch.randn(16) if biased else None
    found = route(logits, rule, bias)
    probs, experts = loop(logits, rule, bias)
    assert found.experts.tolist() == experts
    assert error(found.probs, probs) < 1e-12
    grad = torch.randn_like(probs)
    (expected,) = torch.autograd.grad(probs, logits, grad)
    (actual,) = torch.autograd.grad(found.probs, logits, grad)
    assert float((actual - expected).norm()) <= 1e-12 * float(grad.norm())


def test_equal_scores_choose_the_lower_index() -> None:
    assert route(torch.zeros(3, 8), Rule(3)).experts.tolist() == [[0, 1, 2]] * 3
    grouped = Rule(4, "sigmoid", num_groups=4, group_top_k=2)
    assert route(torch.zeros(3, 8), grouped).experts.tolist() == [[0, 1, 2, 3]] * 3


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    found = route(logits, Rule(2, "sigmoid"), torch.tensor([0.0, 0.0, -5.0, 5.0]))
    assert found.experts.tolist() == [[3, 1]]
    scores = logits.sigmoid()[0, [3, 1]]
    assert error(found.probs[0], scores / scores.sum()) < 1e-6


def test_groups_are_masked_with_minus_infinity() -> None:
    """Biased scores may all be negative; experts of other groups must not win with zeros."""
    found = route(torch.zeros(1, 8), Rule(2, "sigmoid", num_groups=4, group_top_k=1), torch.full((8,), -9.0))
    assert found.experts.tolist() == [[0, 1]]


def test_half_logits_are_computed_in_float32() -> None:
    logits = torch.randn(9, 16).bfloat16()
    found, exact = route(logits, Rule(4)), route(logits.double(), Rule(4))
    assert found.probs.dtype == torch.float32
    assert error(found.probs, exact.probs) < 1e-6


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_statistics_equal_a_loop_over_pools(score: str) -> None:
    logits = torch.randn(17, 6, dtype=torch.float64).requires_grad_()
    mask = torch.rand(17) > 0.3
    bounds = [0, 5, 5, 6, 17]
    found = statistics(logits, 2, score, torch.tensor(bounds, dtype=torch.int32), mask)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    for pool, (start, end) in enumerate(pairwise(bounds)):
        tokens = [t for t in range(start, end) if mask[t]]
        counts = [0.0] * 6
        for t in tokens:
            for e in logits[t].topk(2).indices.tolist():
                counts[e] += 1
        assert found.counts[pool].tolist() == counts
        assert torch.allclose(found.scores[pool], scores[tokens].sum(0), rtol=1e-12)
        assert torch.allclose(found.squares[pool], logits[tokens].logsumexp(-1).square().sum(), rtol=1e-12)
    whole = statistics(logits, 2, score, None, mask)
    assert error(whole.scores[0], found.scores.sum(0)) < 1e-12
    assert whole.counts[0].tolist() == found.counts.sum(0).tolist()


def test_balanced_routing_gives_a_loss_of_one() -> None:
    """``E / (k N^2) sum_e P_e C_e``, the balance loss without its coefficient."""
    tokens, experts, k = 24, 8, 2
    logits = torch.full((tokens, experts), -1e-6)
    for t in range(tokens):
        for j in range(k):
            logits[t, (k * t + j) % experts] = 0.0
    found = statistics(logits, k)
    loss = experts / (k * tokens**2) * (found.scores * found.counts).sum()
    assert abs(float(loss) - 1) < 1e-5


@pytest.mark.parametrize("mask", [None, torch.zeros(0, dtype=torch.bool)])
def test_no_tokens(mask: Tensor | None) -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    assert route(logits, Rule(4, num_groups=4, group_top_k=2)).experts.shape == (0, 4)
    found = route(logits, Rule(2))
    assert found.probs.shape == found.experts.shape == (0, 2)
    sums = statistics(logits, 2, mask=mask)
    assert not any(bool(t.any()) for t in sums)
    (found.probs.sum() + sums.scores.sum()).backward()
    assert logits.grad is not None


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Rule(2, "sofmax"), "Did you mean 'softmax'"),
        (Rule(9), "k=9 of 8 experts"),
        (Rule(0), "k=0 of 8 experts"),
        (Rule(2, num_groups=2), "set both of them"),
        (Rule(2, num_groups=3, group_top_k=1), "8 experts do not divide into num_groups=3"),
        (Rule(2, num_groups=2, group_top_k=3), "group_top_k=3 must be from 1 to num_groups=2"),
        (Rule(5, num_groups=4, group_top_k=2), "k=5 experts cannot come from group_top_k=2 groups of 2"),
        (Rule(1, num_groups=4, group_top_k=2), "group_top_k=2 is more than k=1"),
        (Rule(1, num_groups=4, group_top_k=2, group_experts=3), "group_experts=3 must be from 1 to 2"),
        (Rule(1, num_groups=4, group_top_k=2, group_experts=0), "group_experts=0 must be from 1 to 2"),
        (Rule(1, group_experts=1), "group_experts=1 without groups"),
    ],
)
def test_impossible_rules(rule: Rule, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        route(torch.zeros(2, 8), rule)
