"""The reward of answers of a form, as a regular expression."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megalight.errors import ConfigurationError
from megalight.rl.environment import Answer


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
