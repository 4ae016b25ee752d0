"""Guesses in the engine: whoever guesses, each text is that of the base alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.inference import Completion, DynamicEngine
from megalight.inference.scheduler import Request
from megalight.inference.speculator import DraftSpeculator, EagleSpeculator, NGramSpeculator
from megalight.models.eagle import DraftModel, EagleConfig
from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from tests.inference.test_engine import GREEDY, MODELS, SAMPLED, alone, poisoned, tokens_of
from tests.inference.test_generate import PROMPTS, build
from tests.inference.test_generate_parallel import LAYOUTS, divided, one_device
from tests.support.workers import run

LENGTH = 20


class Told:
    """Guesses what a text will be, or something else at each ``wrong``-th token."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: int, vocabulary: int = 61) -> None:
        self.texts, self.wrong, self.vocabulary, self.guesses = texts, wrong, vocabulary, 4
        self.loop = None

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        found = []
        for request, count in zip(requests, counts, strict=True):
            begin = len(request.tokens)
            text = [*request.tokens[: request.prompt_length], *self.texts[request.number % len(self.texts)]]
            right = enumerate(text[begin : begin + min(count, self.guesses)], begin)
            found.append([(token + (place % self.wrong == 0)) % self.vocabulary for place, token in right])
        return found

    def drop(self) -> None:
        pass


def draft_of(model: GPT) -> DraftModel:
    draft = DraftModel(EagleConfig().beside(model.config)).double()
    initialize(draft, 3)
    return draft


def passes(engine: DynamicEngine, seed: int | None, length: int = LENGTH) -> tuple[list[list[int]], int]:
    """Complete all prompts; return the texts, and in how many passes."""
    count, launch = 0, engine._passes.launch

    def counted() -> bool:
        nonlocal count
        count += 1
        return launch()

    engine._passes.launch = counted  # type: ignore[method-assign]
    for number, prompt in enumerate(PROMPTS):
        params = GREEDY if seed is None else SAMPLED
        own = None if seed is None else seed + number
        engine.add(prompt, max_new_tokens=length, sampling_params=params, seed=own, log_probs=True)
    found = engine.run()
    assert all(len(each.log_probs or []) == len(each.tokens) for each in found.values())
    return tokens_of(found), count


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *[("llama", 11), ("sinks", None), ("experts", 11)],
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("llama", None), ("sinks", 11), ("experts", None))),
    ],
)
def test_texts_are_those_of_the_base(name: str, seed: int | None, poison: None) -> None:
    model = build(**MODELS[name])
    expected = alone(model, LENGTH, seed=seed)
    small = build(**MODELS["llama"])
    with torch.no_grad():
        for weight in small.parameters():
            weight += 0.02
    for speculator, most in (
        (Told(expected, 99), 6),
        (Told(expected, 3), 14),
        (Told(expected, 1), LENGTH + 4),
        (NGramSpeculator(3, shortest=1), LENGTH + 4),
        (DraftSpeculator(small, model, 3, max_sequences=4), LENGTH + 4),
        (DraftSpeculator(model, model, 3), 7 if seed is None else LENGTH + 4),
        (EagleSpeculator(draft_of(model), model, 3), LENGTH + 4),
    ):
        engine = DynamicEngine(model, num_blocks=60, block_size=3, max_sequences=4, speculator=speculator)
        found, count = passes(engine, seed)
        assert found == expected
        assert count <= most, speculator
        assert engine.blocks.free == 60
    # a pool that forces preemption, and steps with room for some of the guesses
    engine = DynamicEngine(model, num_blocks=12, block_size=3, step_tokens=5, speculator=Told(expected, 4))
    assert passes(engine, seed)[0] == expected
    assert engine.blocks.free == 12


def test_texts_end_where_they_would_and_the_engine_may_be_suspended() -> None:
    model = build()
    free = alone(model, LENGTH)
    eos = free[2][4]
    engine = DynamicEngine(model, num_blocks=60, block_size=3, speculator=Told(free, 99))
    for number, prompt in enumerate(PROMPTS):
        stop = (lambda new: len(new) == 7) if number == 0 else None
        engine.add(prompt, max_new_tokens=LENGTH, sampling_params=GREEDY, eos_id=eos, stop=stop)
    found: dict[int, Completion] = {}
    for turn, step in enumerate(engine):
        found |= step.finished
        if turn % 3 == 1:
            engine.suspend(keep_cache=turn % 2 == 0)
            engine.resume()
    expected = alone(model, LENGTH, eos=eos)
    assert found[0].tokens == expected[0][:7]
    assert [found[number].tokens for number in (1, 2, 3)] == expected[1:]
    assert engine.blocks.free == 60


@pytest.mark.parametrize("eagle", [False, True])
def test_a_request_with_nan_fails_alone_beside_guesses(eagle: bool) -> None:
    model = build()
    expected = alone(model, LENGTH)
    bad = next(token for token in range(20, 61) if not any(token in tokens for tokens in expected))
    params = replace(GREEDY, repetition_penalty=1.3, logit_bias={bad: -float("inf")})
    plain = DynamicEngine(model, num_blocks=60)
    plain.add([5, 6, 7], max_new_tokens=LENGTH, sampling_params=params)
    penalized = plain.run()[0].tokens
    speculator = EagleSpeculator(draft_of(model), model) if eagle else Told(expected, 99)
    engine = DynamicEngine(poisoned(model, bad), num_blocks=60, speculator=speculator)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=LENGTH, sampling_params=GREEDY)
    engine.add([5, 6, 7], max_new_tokens=LENGTH, sampling_params=params)
    engine.add([1, bad], max_new_tokens=LENGTH, sampling_params=GREEDY)
    found = engine.run()
    assert [found[number].tokens for number in range(4)] == expected
    assert found[4].tokens == penalized
    assert found[5].reason == "error"


def test_a_wrong_guess_of_a_token_with_nan_costs_nobody_anything() -> None:
    model = build()
    expected = alone(model, LENGTH)
    bad = next(token for token in range(20, 61) if not any(token in tokens for tokens in expected))
    told = Told([[*text[:5], bad, *text[6:]] for text in expected], 99)
    found, _ = passes(DynamicEngine(poisoned(model, bad), num_blocks=60, speculator=told), None)
    assert found == expected


def test_what_followed_before_is_guessed_to_follow() -> None:
    def guess(tokens: list[int], count: int = 4, shortest: int = 2) -> list[int]:
        return NGramSpeculator(4, shortest=shortest).guess([Request(0, tokens, 1, 99)], [count])[0]

    assert guess([1, 2, 3, 4, 1, 2, 3]) == [4, 1, 2, 3]
    assert guess([1, 2, 3, 4, 1, 2, 3], 2) == [4, 1]
    assert guess([7, 2, 3, 4, 1, 2, 3]) == [4, 1, 2, 3]
    assert guess([9, 3, 4, 1, 2, 3]) == []
    assert guess([9, 3, 4, 1, 2, 3], shortest=1) == [4, 1, 2, 3]
    assert guess([1]) == []
    # the newest of several places, found as tokens come
    speculator, request = NGramSpeculator(1), Request(0, [1, 2, 3, 1, 2], 1, 99)
    assert speculator.guess([request], [4]) == [[3]]
    request.tokens += [5, 1, 2]
    assert speculator.guess([request], [4]) == [[5]]


def test_bad_speculators_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot forget a wrong guess"):
        DynamicEngine(build(**MODELS["mamba"]), num_blocks=4, speculator=NGramSpeculator())
    with pytest.raises(ConfigurationError, match="the small model keep one state"):
        DraftSpeculator(build(**MODELS["mamba"]), build())
    with pytest.raises(ConfigurationError, match="longest is 1; it must be at least 2"):
        NGramSpeculator(longest=1)


def _guessed(name: str, options: dict[str, Any]) -> Any:
    _, _, model = divided(name, options)
    engine = DynamicEngine(model, num_blocks=30, block_size=3, speculator=NGramSpeculator(3, shortest=1))
    return passes(engine, 11, 15)[0]


@pytest.mark.parametrize(("name", "ranks", "options"), [LAYOUTS[0], LAYOUTS[3]], ids=str)
def test_ranks_guess_alike(name: str, ranks: int, options: dict[str, Any]) -> None:
    expected = alone(one_device(name), 15, seed=11)
    assert run(_guessed, ranks, name, options) == [expected] * ranks
