"""What a policy is asked, and how its answers are scored: tasks, rewards, and the batches that a loader yields."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, nearest
from megalight.inference.request import Reason


@dataclass(frozen=True)
class Task:
    """One prompt.

    Attributes:
        prompt: its token ids, as the policy reads them.
        row: what rewards know of it: the row of the file, such as its ``answer``.
        number: its place in the data. The draws of its answers follow from it, and so not from the layout.
    """

    prompt: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    number: int = 0


@dataclass(frozen=True)
class Answer:
    """A completion of a prompt.

    Attributes:
        text: without special tokens.
        tokens: its ids, with the one that ended it.
        reason: why it ended: ``end`` token, ``stop`` text, or ``length``, the longest that was allowed.
    """

    text: str
    tokens: Sequence[int]
    reason: Reason


Reward = Callable[[Answer, Mapping[str, Any]], float]
"""What an answer is worth to a row: a function, or an object that can be called. Equal answers have equal values."""


class Score(NamedTuple):
    """What an answer is worth.

    Attributes:
        total: the weighted sum.
        parts: each reward's own value, before its weight, by name.
    """

    total: float
    parts: Mapping[str, float]


class Environment:
    """Decodes answers, and scores them by the weighted sum of rewards.

    Args:
        tokenizer: the policy's.
        rewards: name -> reward. Logs show each one's values under its name.
        weights: name -> factor of the reward in the sum; 1 where it has none. 0: it is only logged.
        ends: ids of tokens that end an answer.

    Raises:
        ConfigurationError: there is no reward, one is no function of an answer and a row, or a weight has no reward or
            is not finite.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float] | None = None,
        ends: Collection[int] = (),
    ) -> None:
        weights = {} if weights is None else weights
        if not rewards:
            raise ConfigurationError("rewards is empty; give a reward by name, such as {'answer': FinalAnswer()}.")
        for name, reward in rewards.items():
            check_reward(name, reward)
        for name, weight in weights.items():
            if name not in rewards:
                raise ConfigurationError(
                    f"reward_weights has {name!r}; the rewards are {', '.join(map(repr, rewards))}."
                    f"{nearest(name, rewards)}"
                )
            if not math.isfinite(weight):
                raise ConfigurationError(f"the weight of {name!r} is {weight}; it must be finite.")
        self.tokenizer = tokenizer
        self.rewards = dict(rewards)
        self.weights = {name: float(weights.get(name, 1.0)) for name in rewards}
        self.ends = tuple(ends)

    def check(self, place: str, row: Mapping[str, Any]) -> None:
        """Let rewards that have a method ``check`` refuse a row, before work starts.

        Args:
            place: where the row stands, for messages.
            row: the row.

        Raises:
            DataError: one refuses it.
        """
        for name, reward in self.rewards.items():
            try:
                getattr(reward, "check", _accepts)(row)
            except DataError as error:
                raise DataError(f"{place}, for the reward {name!r}: {error}") from error

    def score(self, task: Task, tokens: Sequence[int], reason: Reason) -> Score:
        """Return what the completion of a task's prompt is worth.

        Raises:
            DataError: a reward is not a finite number.
        """
        answer = Answer(self.tokenizer.decode_after(task.prompt, tokens), tokens, reason)
        parts = {name: self._value(name, reward, answer, task.row) for name, reward in self.rewards.items()}
        return Score(sum(self.weights[name] * value for name, value in parts.items()), parts)

    def _value(self, name: str, reward: Reward, answer: Answer, row: Mapping[str, Any]) -> float:
        try:
            value: Any = reward(answer, row)
        except Exception as error:
            error.add_note(f"The reward {name!r} raised it, for the answer {answer.text!r} to the row {dict(row)!r}.")
            raise
        # Also scalars of numpy and torch; a text such as "1" is a mistake.
        if value is None or isinstance(value, str) or not math.isfinite(value):
            raise DataError(
                f"the reward {name!r} is {value!r}, for the answer {answer.text!r}; it must be a finite number."
            )
        return float(value)


class PromptBatch:
    """The prompts of a step, and what scores answers to them. It holds no tensors, and hooks leave it as it is.

    Args:
        tasks: the prompts.
        environment: what scores answers.
        fresh: whether answers are to be drawn. If not, those to the last batch, of the same prompts, are trained on
            again.
    """

    def __init__(self, tasks: Sequence[Task], environment: Environment, fresh: bool = True) -> None:
        self.tasks = tuple(tasks)
        self.environment = environment
        self.fresh = fresh

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards."""
        return tuple(self.environment.rewards)

    @property
    def ends(self) -> Collection[int]:
        """Ids of tokens that end an answer."""
        return self.environment.ends

    def score(self, place: int, tokens: Sequence[int], reason: Reason) -> Score:
        """Return what a completion of the prompt ``tasks[place]`` is worth; see :meth:`Environment.score`."""
        return self.environment.score(self.tasks[place], tokens, reason)


def _accepts(row: Mapping[str, Any]) -> None:
    """Refuse no row."""


def check_reward(name: str, reward: Any) -> None:
    """Refuse what cannot be called with an answer and a row, before work starts.

    Raises:
        ConfigurationError: with the name.
    """
    rule = "a reward is called with an answer and a row, and returns a number"
    if isinstance(reward, type) or not callable(reward):
        raise ConfigurationError(f"the reward {name!r} is {reward!r}; {rule}. Give a function or an object.")
    try:
        inspect.signature(reward).bind(None, None)
    except TypeError as error:
        raise ConfigurationError(f"the reward {name!r} cannot be used ({error}); {rule}.") from None
    except ValueError:  # some functions of C have no signature that can be read
        return
