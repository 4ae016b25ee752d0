"""Guesses in the engine: whoever guesses, each text is that of the base alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.inference import Completion, DynamicEngine
from megalight.inference.blocks import BlockPool
from megalight.inference.cache import Cache, NewestTokens
from megalight.inference.scheduler import Request
from megalight.inference.speculator import DraftSpeculator, EagleSpeculator, NGramSpeculator, Speculator
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
        self.texts, self.wrong, self.vocabulary, self.num_speculative_tokens, self.longest = (
            texts,
            wrong,
            vocabulary,
            4,
            10**6,
        )
        self.loop = self.draft = None

    def join(self, cache: Cache, newest: NewestTokens) -> None:
        self.newest = newest

    def begin(self, requests: Sequence[Request]) -> None:
        pass

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> torch.Tensor:
        found = torch.full((len(requests), self.num_speculative_tokens), -1)
        for row, request, count in zip(found, requests, counts, strict=True):
            begin = int(self.newest.lengths[request.slot]) + 1
            text = [*request.tokens[: request.prompt_length], *self.texts[request.number % len(self.texts)]]
            right = enumerate(text[begin : begin + count], begin)
            for place, (index, token) in enumerate(right):
                row[place] = (token + (index % self.wrong == 0)) % self.vocabulary
        return found

    def drop(self) -> None:
        pass


def draft_of(model: GPT) -> DraftModel:
    draft = DraftModel(EagleConfig().for_base(model.config)).double()
    initialize(draft, 3)
    return draft


def passes(
    engine: DynamicEngine, seed: int | None, length: int = LENGTH, ahead: bool = False
) -> tuple[list[list[int]], int]:
    """Complete all prompts; return the texts, and in how many passes."""
    engine._passes.runs_ahead = ahead
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
    rounds = (
        (Told(expected, 99), 6),
        (Told(expected, 3), 14),
        (Told(expected, 1), LENGTH + 4),
        (NGramSpeculator(3, shortest=1), LENGTH + 4),
        (DraftSpeculator(small, model, 3, max_sequences=4), LENGTH + 4),
        (DraftSpeculator(model, model, 3), 7 if seed is None else LENGTH + 4),
        (EagleSpeculator(draft_of(model), model, 3), LENGTH + 4),
    )
    for number, (speculator, most) in enumerate(rounds):
        engine = DynamicEngine(model, num_blocks=60, block_size=3, max_sequences=4, speculator=speculator)
        found, count = passes(engine, seed)
        assert found == expected
        assert count <= most, speculator
        assert engine.blocks.free == 60
        if number % 2:  # before the host knows what was accepted, as on a GPU
            assert passes(engine, seed, ahead=True)[0] == expected
            assert engine.blocks.free == 60
    # a pool that forces preemption, and steps with room for some of the guesses
    for ahead in (False, True):
        engine = DynamicEngine(model, num_blocks=12, block_size=3, step_tokens=5, speculator=Told(expected, 4))
        assert passes(engine, seed, ahead=ahead)[0] == expected
        assert engine.blocks.free == 12


@pytest.mark.parametrize("ahead", [False, True])
def test_texts_end_where_they_would_and_the_engine_may_be_suspended(ahead: bool) -> None:
    model = build()
    free = alone(model, LENGTH)
    eos = free[2][4]
    engine = DynamicEngine(model, num_blocks=60, block_size=3, speculator=Told(free, 99))
    engine._passes.runs_ahead = ahead
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


@pytest.mark.parametrize(("eagle", "ahead"), [(False, False), (True, True)])
def test_a_request_with_nan_fails_alone_beside_guesses(eagle: bool, ahead: bool) -> None:
    model = build()
    expected = alone(model, LENGTH)
    bad = next(token for token in range(20, 61) if not any(token in tokens for tokens in expected))
    params = replace(GREEDY, repetition_penalty=1.3, logit_bias={bad: -float("inf")})
    plain = DynamicEngine(model, num_blocks=60)
    plain.add([5, 6, 7], max_new_tokens=LENGTH, sampling_params=params)
    penalized = plain.run()[0].tokens
    speculator = EagleSpeculator(draft_of(model), model) if eagle else Told(expected, 99)
    engine = DynamicEngine(poisoned(model, bad), num_blocks=60, speculator=speculator)
    engine._passes.runs_ahead = ahead
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=LENGTH, sampling_params=GREEDY)
    engine.add([5, 6, 7], max_new_tokens=LENGTH, sampling_params=params)
    engine.add([1, bad], max_new_tokens=LENGTH, sampling_params=GREEDY)
    found = engine.run()
    assert [found[number].tokens for number in range(4)] == expected
    assert found[4].tokens == penalized
    assert found[5].reason == "error"


@pytest.mark.parametrize("kind", ["told", "ngrams", "small", "eagle"])
def test_a_round_begins_before_the_host_knows_the_last_one(kind: str) -> None:
    """Two rounds are in flight, the second wherever the first was right; an ended text costs one row."""
    model = build()
    expected = alone(model, LENGTH)
    speculator: Speculator = Told(expected, 3)
    if kind == "ngrams":
        speculator = NGramSpeculator(3, shortest=1)
    elif kind == "small":
        speculator = DraftSpeculator(model, model, 3)
    elif kind == "eagle":
        speculator = EagleSpeculator(draft_of(model), model, 3)
    engine = DynamicEngine(model, num_blocks=60, block_size=3, speculator=speculator)
    engine._passes.runs_ahead, guess, ahead = True, speculator.propose, [0, 0]

    def watched(requests: Sequence[Request], counts: Sequence[int]) -> torch.Tensor:
        ahead[any(request.unchecked for request in requests)] += 1
        return guess(requests, counts)

    speculator.propose = watched  # type: ignore[method-assign]
    eos = expected[0][7]
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=LENGTH, sampling_params=GREEDY, eos_id=eos)
    assert tokens_of(engine.run()) == alone(model, LENGTH, eos=eos)
    assert ahead[True] > 2 * ahead[False]
    assert engine.blocks.free == 60


def test_a_wrong_guess_of_a_token_with_nan_costs_nobody_anything() -> None:
    model = build()
    expected = alone(model, LENGTH)
    bad = next(token for token in range(20, 61) if not any(token in tokens for tokens in expected))
    told = Told([[*text[:5], bad, *text[6:]] for text in expected], 99)
    found, _ = passes(DynamicEngine(poisoned(model, bad), num_blocks=60, speculator=told), None)
    assert found == expected


def test_what_followed_before_is_guessed_to_follow() -> None:
    def guesser(num_speculative_tokens: int, shortest: int = 2) -> tuple[NGramSpeculator, Request, Cache]:
        cache = Cache({}, 2, 20, BlockPool(2, 8, 5))
        speculator = NGramSpeculator(num_speculative_tokens, shortest=shortest)
        newest = NewestTokens(3, torch.device("cpu"), num_speculative_tokens)
        speculator.join(cache, newest)
        return speculator, Request(0, [], 1, 99, slot=1), cache

    def after(speculator: NGramSpeculator, request: Request, count: int) -> list[int]:
        assert speculator._newest is not None
        assert speculator._cache is not None
        speculator._newest.put([1], [request.tokens])
        # more may be stored than have run
        speculator._cache.lengths[1] = len(request.tokens) + 1
        found = speculator.propose([request], [count])[0, :count].tolist()
        return found[: found.index(-1)] if -1 in found else found

    def propose(tokens: list[int], count: int = 4, shortest: int = 2) -> list[int]:
        speculator, request, _ = guesser(4, shortest)
        request.tokens = tokens
        speculator.begin([request])
        return after(speculator, request, count)

    assert propose([1, 2, 3, 4, 1, 2, 3]) == [4, 1, 2, 3]
    assert propose([1, 2, 3, 4, 1, 2, 3], 2) == [4, 1]
    assert propose([7, 2, 3, 4, 1, 2, 3]) == [4, 1, 2, 3]
    assert propose([9, 3, 4, 1, 2, 3]) == []
    assert propose([9, 3, 4, 1, 2, 3], shortest=1) == [4, 1, 2, 3]
    assert propose([5, 1, 5], shortest=1) == [1, 5]
    assert propose([1, 2]) == []
    # the newest of several places, found as tokens come: a right guess, and the one after it
    speculator, request, _ = guesser(1)
    request.tokens = [1, 2, 3, 1, 2]
    speculator.begin([request])
    assert after(speculator, request, 1) == [3]
    request.tokens += [3, 5]
    assert after(speculator, request, 1) == []
    request.tokens += [1]
    assert after(speculator, request, 1) == []
    request.tokens += [2]
    assert after(speculator, request, 1) == [3]
    request.tokens += [3]
    assert after(speculator, request, 1) == [5]


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
    return passes(engine, 11, 15, ahead=engine._passes.stages == 1)[0]


@pytest.mark.parametrize(("name", "ranks", "options"), [LAYOUTS[0], LAYOUTS[3]], ids=str)
def test_ranks_guess_alike(name: str, ranks: int, options: dict[str, Any]) -> None:
    expected = alone(one_device(name), 15, seed=11)
    assert run(_guessed, ranks, name, options) == [expected] * ranks
