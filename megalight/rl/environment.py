"""What a policy is asked, and how its answers are scored: tasks, rewards, and the batches that a loader yields."""

from __future__ import annotations

import inspect
import math
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, MegalightError, as_float, nearest
from megalight.inference.scheduler import Reason


@dataclass(frozen=True)
class RLTask:
    """One prompt.

    Attributes:
        prompt: its token ids, as the policy reads them.
        row: what rewards know of it: the row of the file, such as its ``answer``.
        number: its place in the data. The samples of its answers follow from it, and so not from the layout.
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
        reward_timeout: seconds that a reward may take for one answer. A signal (SIGALRM) then interrupts Python code,
            waiting and regular expressions, and the run stops with the reward's name. None: no limit.

    Raises:
        ConfigurationError: there is no reward, one is no function of an answer and a row, a weight has no reward or is
            not finite, or ``reward_timeout`` is not above 0.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float] | None = None,
        ends: Collection[int] = (),
        reward_timeout: float | None = None,
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
            if not math.isfinite(as_float(weight)):
                raise ConfigurationError(f"the weight of {name!r} is {weight!r}; it must be a finite number.")
        if reward_timeout is not None and not 0 < as_float(reward_timeout) < math.inf:
            raise ConfigurationError(
                f"reward_timeout is {reward_timeout!r}; it must be a number of seconds above 0, or null for no limit."
            )
        self.tokenizer = tokenizer
        self.rewards = dict(rewards)
        self.weights = {name: float(weights.get(name, 1.0)) for name in rewards}
        self.ends = tuple(ends)
        self.reward_timeout = reward_timeout

    def check(self, place: str, row: Mapping[str, Any]) -> None:
        """Let rewards that have a method ``check`` refuse a row, before work starts.

        Args:
            place: where the row stands, for messages.

        Raises:
            DataError: one refuses it.
        """
        for name, reward in self.rewards.items():
            try:
                getattr(reward, "check", _accepts)(row)
            except DataError as error:
                raise DataError(f"{place}, for the reward {name!r}: {error}") from error
            except Exception as error:
                error.add_note(f"The check of the reward {name!r} raised it, for {place}: {dict(row)!r}.")
                raise

    def score(self, task: RLTask, tokens: Sequence[int], reason: Reason) -> Score:
        """Return what the completion of a task's prompt is worth.

        Raises:
            DataError: a reward is not a finite number.
            MegalightError: a reward takes longer than ``reward_timeout``.
        """
        answer = Answer(self.tokenizer.decode_after(task.prompt, tokens), tokens, reason)
        parts = {name: self._value(name, reward, answer, task.row) for name, reward in self.rewards.items()}
        return Score(sum(self.weights[name] * value for name, value in parts.items()), parts)

    def _value(self, name: str, reward: Reward, answer: Answer, row: Mapping[str, Any]) -> float:
        try:
            with _time_limit(self.reward_timeout):
                value: Any = reward(answer, row)
        except _TimeoutReached:
            raise MegalightError(
                f"the reward {name!r} has not returned within reward_timeout={self.reward_timeout} seconds, for the "
                f"answer {answer.text!r} to the row {dict(row)!r}; make it faster, or raise the limit."
            ) from None
        except Exception as error:
            error.add_note(f"The reward {name!r} raised it, for the answer {answer.text!r} to the row {dict(row)!r}.")
            raise
        number = as_float(value)
        if not math.isfinite(number):
            raise DataError(
                f"the reward {name!r} is {value!r}, for the answer {answer.text!r}; it must be a finite number."
            )
        return number


class _TimeoutReached(BaseException):
    """Ends a block that takes too long. No ``Exception``: rewards may catch these."""


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Interrupt a block that takes longer than ``seconds``; None: no limit.

    Raises:
        ConfigurationError: this is not the main thread, which alone gets signals.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("reward_timeout needs the main thread of the process; leave it out.")
    reached = False

    def interrupt(*_: object) -> None:
        nonlocal reached
        reached = True
        raise _TimeoutReached

    handler = signal.signal(signal.SIGALRM, interrupt)
    # Repeated, as the block may catch the first.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    except (Exception, _TimeoutReached):
        if not reached:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
    if reached:
        raise _TimeoutReached


class PromptBatch:
    """The prompts of a step, and what scores answers to them. It holds no tensors, and hooks leave it as it is.

    Args:
        tasks: the prompts.
        environment: what scores answers.
        fresh: whether answers are to be sampled. If not, those to the last batch, of the same prompts, are trained on
            again.
    """

    def __init__(self, tasks: Sequence[RLTask], environment: Environment, fresh: bool = True) -> None:
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
    if any(map(inspect.iscoroutinefunction, (reward, getattr(reward, "__call__", None)))):  # noqa: B004
        raise ConfigurationError(f"the reward {name!r} is asynchronous (async def); {rule}. Await inside of it.")
    try:
        inspect.signature(reward).bind(None, None)
    except TypeError as error:
        raise ConfigurationError(f"the reward {name!r} cannot be used ({error}); {rule}.") from None
    except ValueError:  # some functions of C have no signature that can be read
        return
