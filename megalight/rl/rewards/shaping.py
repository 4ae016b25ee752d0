"""Rewards of the form of an answer: its length, a pattern, and rewards for some rows only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megalight.errors import ConfigurationError, DataError, nearest
from megalight.rl.environment import Answer, Reward, check_reward


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


class Pattern:
    r"""1 if an answer has a form, else 0.

    Args:
        pattern: a regular expression of Python in which ``.`` stands for line breaks, too, such as
            ``<think>.*?</think>\s*<answer>.*?</answer>``. Where prompts end with ``<think>``, answers begin after it.
            Some patterns take very long for long answers, such as ``(a+)+b``; ``reward_timeout`` of the data module
            ends the run then.
        whole: whether the whole answer must match, without spaces around it. If not, a part of it is enough.

    Raises:
        ConfigurationError: it is no regular expression.
    """

    def __init__(self, pattern: str, *, whole: bool = True) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigurationError(f"pattern {pattern!r} is no regular expression: {error}.") from error
        self.whole = whole

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        """Return the value of an answer."""
        found = self.pattern.fullmatch(answer.text.strip()) if self.whole else self.pattern.search(answer.text)
        return 1.0 if found else 0.0


class RowFilter:
    """Row filter: another reward for rows of one kind, and 0 for all others, so that a run can have several tasks.

    Args:
        column: where rows say their kind. Every row has it.
        equals: the kind.
        reward: the reward of such rows.

    Raises:
        ConfigurationError: ``reward`` is no function of an answer and a row.
    """

    def __init__(self, *, column: str, equals: str | int, reward: Reward) -> None:
        check_reward("reward", reward)
        self.column = column
        self.equals = equals
        self.reward = reward

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        """Return the value of an answer."""
        return self.reward(answer, row) if row[self.column] == self.equals else 0.0

    def check(self, row: Mapping[str, Any]) -> None:
        """Refuse a row without the column, or of the kind that the reward cannot use.

        Raises:
            DataError: it is one.
        """
        if self.column not in row:
            raise DataError(
                f"the row has no {self.column!r}; it has {', '.join(map(repr, row))}. Each row must say its kind there."
                f"{nearest(self.column, row)}"
            )
        check = getattr(self.reward, "check", None)
        if check is not None and row[self.column] == self.equals:
            check(row)
