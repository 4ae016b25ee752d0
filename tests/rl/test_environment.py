from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from lightning.pytorch.utilities import move_data_to_device

from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.rl.environment import Answer, Environment, PromptBatch, Task


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


def batch(tokenizer: Tokenizer, rewards: Mapping[str, Any], **options: Any) -> PromptBatch:
    task = Task(tuple(tokenizer.encode("What is it?")), {"answer": "the answer"})
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
        ({"equal": equal}, {"equal": float("nan")}, "must be finite"),
    ],
)
def test_wrong_rewards_are_refused_before_work(
    tokenizer: Tokenizer, rewards: Mapping[str, Any], weights: Mapping[str, float] | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Environment(tokenizer, rewards, weights)


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_refused(tokenizer: Tokenizer, value: Any) -> None:
    with pytest.raises(DataError, match="must be a finite number"):
        batch(tokenizer, {"a": lambda answer, row: value}).score(0, [], "length")


def test_an_error_of_a_reward_names_it(tokenizer: Tokenizer) -> None:
    with pytest.raises(KeyError) as raised:
        batch(tokenizer, {"mine": lambda answer, row: row["target"]}).score(0, [], "length")
    assert "The reward 'mine' raised it" in raised.value.__notes__[0]
