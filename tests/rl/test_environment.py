from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import move_data_to_device

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, MegalightError
from megalight.rl.environment import Answer, Environment, PromptBatch, RLTask


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["what is the answer " * 9], 270)


class Says:
    """Counts a text in an answer."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        return answer.text.count(self.text)


def equal(answer: Answer, row: Mapping[str, Any]) -> bool:
    return answer.text == row["answer"]


async def later(answer: Answer, row: Mapping[str, Any]) -> float:
    return 1.0


class Later:
    async def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        return 1.0


def batch(tokenizer: Tokenizer, rewards: Mapping[str, Any], **options: Any) -> PromptBatch:
    task = RLTask(tuple(tokenizer.encode("What is it?")), {"answer": "the answer"})
    return PromptBatch([task], Environment(tokenizer, rewards, **options))


def test_an_answer_is_decoded_without_its_end_and_its_rewards_are_summed(tokenizer: Tokenizer) -> None:
    prompts = batch(
        tokenizer, {"equal": equal, "e": Says("e"), "log": Says("a")}, weights={"e": -0.25, "log": 0}, ends=[0]
    )
    score = prompts.score(0, [*tokenizer.encode("the answer"), tokenizer.eod_id or 0], "end")
    assert score.parts == {"equal": 1.0, "e": 2.0, "log": 1.0}
    assert score.total == 1.0 - 0.5
    assert prompts.score(0, tokenizer.encode("the"), "length").parts["equal"] == 0.0
    assert tuple(prompts.ends) == (0,)


def test_a_reward_sees_tokens_and_why_they_ended(tokenizer: Tokenizer) -> None:
    seen: list[Answer] = []
    prompts = batch(tokenizer, {"see": lambda answer, row: seen.append(answer) or 0.0})
    prompts.score(0, [270 - 1], "length")
    assert (list(seen[0].tokens), seen[0].reason) == ([270 - 1], "length")


def test_lightning_leaves_a_batch_as_it_is(tokenizer: Tokenizer) -> None:
    prompts = batch(tokenizer, {"equal": equal})
    assert move_data_to_device(prompts, "cpu") is prompts
    assert len(prompts) == 1
    assert prompts.names == ("equal",)


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ({}, None, "rewards is empty"),
        ({"a": Says}, None, "'a' is <class"),
        ({"a": "tests.judge"}, None, "a reward is called with an answer and a row"),
        ({"a": lambda answer: 1.0}, None, "too many positional arguments"),
        ({"equal": equal}, {"equals": 1.0}, "reward_weights has 'equals'.*Did you mean 'equal'"),
        ({"equal": equal}, {"equal": float("nan")}, "must be a finite number"),
        ({"equal": equal}, {"equal": "1"}, "the weight of 'equal' is '1'; it must be a finite number"),
        ({"a": later}, None, "the reward 'a' is asynchronous"),
        ({"a": Later()}, None, "the reward 'a' is asynchronous"),
    ],
)
def test_wrong_rewards_are_refused_before_work(
    tokenizer: Tokenizer, rewards: Mapping[str, Any], weights: Mapping[str, float] | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Environment(tokenizer, rewards, weights)


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1", b"1", float("nan"), float("inf"), 1j, object()),
        *([1.0], {"score": 1.0}, (), {1.0}, np.ones(2), torch.ones(2), torch.ones(0), (each for each in [1.0])),
        pytest.param(10**400, id="large"),
    ],
)
def test_a_value_that_is_no_number_is_refused(tokenizer: Tokenizer, value: Any) -> None:
    with pytest.raises(DataError, match=r"the reward 'a' is .*it must be a finite number"):
        batch(tokenizer, {"a": lambda answer, row: value}).score(0, [], "length")


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1), Fraction(1)])
def test_scalars_of_all_kinds_are_numbers(tokenizer: Tokenizer, value: Any) -> None:
    score = batch(tokenizer, {"a": lambda answer, row: value}).score(0, [], "length")
    assert (score.total, type(score.parts["a"])) == (1.0, float)


def sleeps() -> None:
    time.sleep(60)


def runs() -> None:
    while True:
        pass


def catches() -> None:
    for _ in range(2):
        with contextlib.suppress(BaseException):
            sleeps()


def raises_another() -> None:
    try:
        sleeps()
    except BaseException:
        raise ValueError from None


def backtracks() -> None:
    re.fullmatch("(a+)+b", "a" * 60)


@pytest.mark.parametrize("hang", [sleeps, runs, catches, raises_another, backtracks])
def test_a_reward_that_hangs_is_stopped_with_its_name(tokenizer: Tokenizer, hang: Any) -> None:
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    prompts = batch(tokenizer, {"equal": equal, "slow": lambda answer, row: hang() or 1.0}, reward_timeout=0.05)
    begin = time.monotonic()
    with pytest.raises(MegalightError, match=r"the reward 'slow' has not returned within reward_timeout=0.05 seconds"):
        prompts.score(0, tokenizer.encode("the answer"), "length")
    assert time.monotonic() - begin < 30
    assert signal.getsignal(signal.SIGALRM) == handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (timer[0] > 0)


def test_a_reward_within_its_time_is_as_without_a_limit(tokenizer: Tokenizer) -> None:
    timed = batch(tokenizer, {"equal": equal, "e": Says("e")}, reward_timeout=60)
    free = batch(tokenizer, {"equal": equal, "e": Says("e")})
    tokens = tokenizer.encode("the answer")
    assert timed.score(0, tokens, "length") == free.score(0, tokens, "length")
    with pytest.raises(KeyError) as raised:
        batch(tokenizer, {"mine": lambda answer, row: row["target"]}, reward_timeout=60).score(0, [], "length")
    assert "The reward 'mine' raised it" in raised.value.__notes__[0]
    for bad in (0, -1, float("nan"), float("inf"), "5"):
        with pytest.raises(ConfigurationError, match=r"reward_timeout is .*it must be a number of seconds above 0"):
            batch(tokenizer, {"equal": equal}, reward_timeout=bad)


def test_a_time_limit_needs_the_main_thread(tokenizer: Tokenizer) -> None:
    timed, errors = batch(tokenizer, {"equal": equal}, reward_timeout=60), []

    def score() -> None:
        try:
            timed.score(0, [], "length")
        except ConfigurationError as error:
            errors.append(str(error))

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert errors == ["reward_timeout needs the main thread of the process; leave it out."]


def test_an_error_of_a_check_names_the_reward(tokenizer: Tokenizer) -> None:
    class Checks(Says):
        def check(self, row: Mapping[str, Any]) -> None:
            row["target"]

    with pytest.raises(KeyError) as raised:
        Environment(tokenizer, {"mine": Checks("a")}).check("rows.jsonl line 2", {"a": 1})
    assert raised.value.__notes__ == ["The check of the reward 'mine' raised it, for rows.jsonl line 2: {'a': 1}."]


def test_an_error_of_a_reward_names_it(tokenizer: Tokenizer) -> None:
    with pytest.raises(KeyError) as raised:
        batch(tokenizer, {"mine": lambda answer, row: row["target"]}).score(0, [], "length")
    assert "The reward 'mine' raised it" in raised.value.__notes__[0]
