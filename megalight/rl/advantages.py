"""What an answer is worth beside the other answers to its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

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
