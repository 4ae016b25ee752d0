"""The loss of GRPO: clipped ratios of probabilities, a KL divergence, and group-relative advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.models.config import require_choice

Normalize = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of a policy.

    For a token with probability ``p`` now and ``q`` when it was sampled, and ``r = p / q``, it is
    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, with the advantage ``A`` of its answer (PPO,
    https://arxiv.org/abs/1707.06347), plus ``kl`` times the divergence from the reference.

    Attributes:
        clip_low: how far a ratio may fall before its gradient ends.
        clip_high: how far it may rise; None: as far as ``clip_low``. DAPO takes 0.28 beside 0.2
            (https://arxiv.org/abs/2503.14476).
        kl: factor of the divergence from the reference, estimated for each token as ``d - log(d) - 1`` with
            ``d = p_reference / p`` (http://joschu.net/blog/kl-approx.html). 0: there is no reference.
        normalize: what the sum over tokens is divided by. ``token``: the number of tokens of all answers of the step
            (DAPO). ``sequence``: the length of the answer, and the number of answers (GRPO). ``constant``:
            ``max_new_tokens``, and the number of answers, so that length has no influence (Dr. GRPO,
            https://arxiv.org/abs/2503.20783).

    Raises:
        ConfigurationError: a value is out of range.
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    kl: float = 0.0
    normalize: Normalize = "token"

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ConfigurationError(f"clip_low is {self.clip_low}; it must be above 0 and at most 1.")
        if self.clip_high is not None and not self.clip_high > 0:
            raise ConfigurationError(f"clip_high is {self.clip_high}; it must be above 0.")
        if not self.kl >= 0:
            raise ConfigurationError(f"kl is {self.kl}; it must be at least 0.")
        require_choice("normalize", self.normalize, get_args(Normalize))

    def shares(self, length: int, longest: int) -> tuple[float, float]:
        """Return how much each token of an answer counts in the loss, and in what it is divided by.

        Args:
            longest: tokens that it could have.
        """
        if self.normalize == "token":
            return 1.0, 1.0
        return 1 / (length if self.normalize == "sequence" else longest), 1 / length

    def __call__(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token without divergence, and whether its gradient ended; all ``[T]``.

        Args:
            log_probs: by the policy now.
            old_log_probs: by the policy that sampled the tokens.
        """
        ratios = (log_probs - old_log_probs).exp()
        high = self.clip_low if self.clip_high is None else self.clip_high
        clipped = ratios.clamp(1 - self.clip_low, 1 + high) * advantages
        free = ratios * advantages
        return -torch.minimum(free, clipped), clipped < free


def divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from log-probabilities ``[T]`` of tokens that the policy sampled; at least 0."""
    ratio = reference - log_probs
    return ratio.exp() - ratio - 1


Scale = Literal["group", "none"]

SMALL = 1e-4
"""Added to the standard deviation of a group, whose rewards may be almost equal."""


def group_advantages(rewards: Sequence[float], scale: Scale = "group") -> list[float]:
    """Return the rewards of a group of answers to one prompt, less their mean.

    Args:
        rewards: one for each answer.
        scale: ``group`` divides by the standard deviation of the group, with ``n - 1`` in the denominator (GRPO,
            https://arxiv.org/abs/2402.03300). ``none`` does not, so that easy and hard prompts count alike (Dr. GRPO,
            https://arxiv.org/abs/2503.20783).
    """
    mean = math.fsum(rewards) / len(rewards)
    # Of equal rewards the mean may be off by rounding, which the division would turn into an advantage.
    around = [0.0 if max(rewards) == min(rewards) else reward - mean for reward in rewards]
    if scale == "none":
        return around
    return [value / (deviation(rewards) + SMALL) for value in around]


def deviation(rewards: Sequence[float]) -> float:
    """Return the standard deviation of a group, with ``n - 1`` in the denominator; of a single reward 0."""
    if len(rewards) < 2:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
