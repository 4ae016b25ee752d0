"""The penalty of answers that come near the longest that is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.errors import ConfigurationError
from megalight.rl.environment import Answer


class SoftOverlong:
    """0 for answers of up to ``longest - buffer`` tokens, -1 from ``longest`` on, and in between on the line.

    It is equation 13 of DAPO (https://arxiv.org/abs/2503.14476). An answer that was cut off at the longest length is
    punished less abruptly, so that the policy learns from it to be shorter.

    Args:
        longest: tokens of the longest answer, as ``max_new_tokens`` of the rollouts.
        buffer: the last tokens before it, in which the penalty grows.

    Raises:
        ConfigurationError: not ``0 < buffer <= longest``.
    """

    def __init__(self, longest: int, buffer: int) -> None:
        if not 0 < buffer <= longest:
            raise ConfigurationError(f"buffer is {buffer} and longest {longest}; buffer must be from 1 to longest.")
        self.longest = longest
        self.buffer = buffer

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        """Return the value of an answer."""
        over = len(answer.tokens) - (self.longest - self.buffer)
        return -min(max(over, 0) / self.buffer, 1.0)
