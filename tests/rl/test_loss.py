"""The loss of tokens, and its gradient, at ratios on both sides of the clip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.rl.loss import PolicyLoss, divergence


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.4, 2.0, -2.6, 0.0),  # it rose far enough
        (0.5, 2.0, -1.0, -1.0),  # it fell, and is to rise
        (0.5, -2.0, 1.6, 0.0),  # it fell far enough
        (1.4, -2.0, 2.8, 2.8),  # it rose, and is to fall
    ],
)
def test_a_gradient_ends_where_a_ratio_has_moved_far_enough(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    old_log_probs = torch.tensor([-1.0], dtype=torch.float64)
    now = (old_log_probs + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    found, clipped = PolicyLoss(clip_low=0.2, clip_high=0.3)(now, old_log_probs, torch.tensor([advantage]).double())
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert now.grad is not None
    assert now.grad.item() == pytest.approx(slope)  # of a logarithm: the ratio times the slope of the loss
    assert clipped.item() is (slope == 0)


def test_one_clip_holds_on_both_sides() -> None:
    old_log_probs, now = torch.zeros(1), torch.tensor([2.0]).log()
    assert PolicyLoss(clip_low=0.1)(now, old_log_probs, torch.ones(1))[0].item() == pytest.approx(-1.1)


def test_the_divergence_estimates_the_one_of_distributions() -> None:
    """Its mean over all tokens, each as often as the policy draws it, is the divergence; no single value is below 0."""
    policy, reference = (torch.randn(50, generator=torch.Generator().manual_seed(n)).double() for n in (1, 2))
    policy, reference = policy.log_softmax(-1), reference.log_softmax(-1)
    each = divergence(policy, reference)
    assert (each >= 0).all()
    exact = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * each).sum() == pytest.approx(exact)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_low": 0.0}, "clip_low is 0.0"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"kl": -1.0}, "kl is -1.0"),
        ({"kl": float("nan")}, "kl is nan"),
        ({"normalize": "tokens"}, "normalize is 'tokens'.*Did you mean 'token'"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PolicyLoss(**values)
