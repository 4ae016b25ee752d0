"""A reward for some of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.errors import DataError, nearest
from megalight.rl.environment import Answer, Reward, check_reward


class Where:
    """Another reward for rows of one kind, and 0 for all others, so that one run can have several kinds of prompts.

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
