"""The engine: each completion is that of its prompt alone, however prompts are divided and whoever else is there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalight.errors import BackendError, ConfigurationError, DataError, MegalightError
from megalight.inference import Completion, DynamicEngine, EngineStep, SamplingParams, generate
from megalight.inference.scheduler import Stop
from megalight.models.gpt import GPT, AttentionConfig, MambaConfig
from megalight.nn.init import initialize
from megalight.nn.moe import MoEConfig
from megalight.nn.moe.config import CapacityConfig, RouterConfig
from megalight.types import PackedSequences
from tests.inference.test_generate import PROMPTS, STYLES, build

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9)
MOE = MoEConfig(num_experts=4, ffn_hidden_size=10, pattern=(False, True))
MAMBA = MambaConfig(num_heads=4, head_dim=6, state_size=5, num_groups=2)
MODELS: dict[str, Any] = {name: {"style": name} for name in STYLES} | {
    "experts": {"moe": MOE},
    "mamba": {"mixer_pattern": ("mamba", "attention"), "mamba": MAMBA},
}


def alone(model: GPT, new: int = 9, seed: int | None = None, eos: int | None = None) -> list[list[int]]:
    """Completions by ``generate``, one prompt at a time."""
    options: dict[str, Any] = {"temperature": 0}
    if seed is not None:
        options = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    found = []
    for number, prompt in enumerate(PROMPTS):
        own = None if seed is None else seed + number
        found += generate(model, [prompt], max_new_tokens=new, eos_id=eos, seed=own, **options)
    return found


def ask(engine: DynamicEngine, **options: Any) -> list[int]:
    return [engine.add(prompt, **{"max_new_tokens": 9, "sampling_params": GREEDY} | options) for prompt in PROMPTS]


def tokens_of(found: dict[int, Completion]) -> list[list[int]]:
    return [completion.tokens for completion in found.values()]


@pytest.mark.parametrize(
    ("name", "step_tokens"),
    [
        ("llama", 1),
        *[
            pytest.param(name, 5, marks=[pytest.mark.full] * (name in ("gpt2", "tempered", "capped")))
            for name in MODELS
        ],
    ],
)
def test_completions_are_those_of_each_prompt_alone(name: str, step_tokens: int, poison: None) -> None:
    model = build(**MODELS[name])
    greedy, drawn = alone(model), alone(model, seed=11)
    # (6, 3): the longest request alone takes 5 blocks of 6
    for num_blocks, block_size in [(6, 3), (60, 1), (4, 16)][: 3 if name == "llama" else 1]:
        engine = DynamicEngine(model, num_blocks=num_blocks, block_size=block_size, step_tokens=step_tokens)
        ask(engine)
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11 + number)
        preempted = 0
        found: dict[int, Completion] = {}
        for step in engine:
            preempted += len(step.preempted)
            found |= step.finished
        assert [found[number].tokens for number in range(8)] == greedy + drawn
        assert {completion.reason for completion in found.values()} == {"length"}
        assert engine.blocks.free == num_blocks
        assert engine.unfinished == []
        if num_blocks == 6 and step_tokens >= 3:
            assert preempted, "the small pool forces nothing"


SHARED = MoEConfig(num_experts=6, ffn_hidden_size=10, router=RouterConfig(top_k=2, score="sigmoid"))
KINDS = MODELS | {
    "chunks": {"attention": AttentionConfig(chunk=6, window_pattern=(True, False))},
    "shared": {"moe": SHARED},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "windowed")) for name in KINDS]
)
def test_requests_that_come_at_random_become_what_they_become_alone(name: str, poison: None) -> None:
    """26 for each of 13 models, with cancels, all ways to suspend, preemption and shared beginnings, in both ways."""
    model, chance = build(**KINDS[name]), random.Random(name)
    engine = DynamicEngine(model, num_blocks=12, block_size=3, max_sequences=5, step_tokens=7)
    first = [chance.randrange(61) for _ in range(12)]
    asked: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    found: dict[int, Completion] = {}
    preempted = shared = suspends = 0
    while len(asked) < 26 or engine.unfinished:
        engine._passes.runs_ahead = len(asked) > 12
        for _ in range(chance.choice([0, 0, 1, 2]) * (len(asked) < 26)):
            own = [chance.randrange(61) for _ in range(chance.randint(1, 5))]
            prompt, new = [*first[: chance.choice([0, 6, 12])], *own], chance.randint(1, 16)
            scored, number = chance.random() < 0.3, max(asked, default=-1) + 1
            given = {"max_new_tokens": new, "sampling_params": SAMPLED, "seed": number}
            assert engine.add(prompt, log_probs=True, prompt_log_probs=scored, **given) == number
            asked[number], lengths[number] = prompt, new
        if (step := engine.step()) is not None:
            preempted, shared = preempted + len(step.preempted), shared + sum(step.shared.values())
            found |= step.finished
        if engine.unfinished and chance.random() < 0.08:
            number = chance.choice(engine.unfinished)
            engine.cancel(number)
            lengths.pop(number)
        if chance.random() < 0.1:
            suspends += 1
            engine.suspend(keep_cache=chance.random() < 0.5, weights=chance.random() < 0.5)
            engine.resume()
    assert found.keys() == lengths.keys()
    assert preempted
    assert shared
    assert suspends
    assert len(found) < len(asked)
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    for number, completion in found.items():
        prompt = asked[number]
        (tokens,) = generate(model, [prompt], max_new_tokens=lengths[number], seed=number, **options)
        assert completion.tokens == tokens
        row = torch.tensor([*prompt, *tokens])
        with torch.no_grad():
            logits = model(row, PackedSequences.of_lengths([len(row)])).logits
        expected = logits.log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0].tolist()
        assert completion.log_probs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-10)
        assert (completion.prompt_log_probs or []) == pytest.approx(expected[: len(completion.prompt_log_probs or [])])
    assert engine.blocks.free == 12


@pytest.mark.parametrize(
    "name", ["llama", "mamba", *(pytest.param(name, marks=pytest.mark.full) for name in ("sinks", "experts", "delta"))]
)
def test_a_pass_may_begin_before_the_tokens_of_the_last_one_are_known(name: str, poison: None) -> None:
    """As on a GPU: texts end by their tokens, by functions and by length, are cancelled, preempted and suspended."""
    model = build(**MODELS[name])
    free = alone(model, 12, seed=11)
    eos = free[2][4]
    expected = alone(model, 12, seed=11, eos=eos)
    engine = DynamicEngine(model, num_blocks=14, block_size=3, max_sequences=3, step_tokens=6)
    engine._passes.runs_ahead = True
    ahead = 0
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_new_tokens=12, sampling_params=SAMPLED, seed=11 + number, eos_id=eos, log_probs=True)
        engine.add(PROMPTS[0], max_new_tokens=12, sampling_params=GREEDY, stop=lambda new: len(new) == 3)
        lost = engine.add([1, 2, 3], max_new_tokens=9, seed=1)
        found: dict[int, Completion] = {}
        for count, step in enumerate(engine):
            ahead += len(engine._passes.flights)
            found |= step.finished
            if count == 4:
                engine.cancel(lost)
            if turn and count == 7:
                engine.suspend()
                engine.resume()
        assert [found[number].tokens for number in sorted(found)[:4]] == expected
        assert all(len(each.log_probs or []) == len(each.tokens) for each in [*found.values()][:4] if each.log_probs)
        assert found[lost - 1].tokens == alone(model, 3)[0]
        assert engine.blocks.free == 14
        assert engine.step() is None
    assert ahead > 8


def test_log_probabilities_are_those_of_a_whole_pass() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=7, block_size=3, step_tokens=4)
    ask(engine, sampling_params=SAMPLED, seed=3, log_probs=True)
    plain = engine.add([1, 2], max_new_tokens=2)
    found = engine.run()
    assert found[plain].log_probs is None
    for prompt, completion in zip(PROMPTS, found.values(), strict=False):
        row = torch.tensor([*prompt, *completion.tokens])
        with torch.no_grad():
            logits = model(row, PackedSequences.of_lengths([len(row)])).logits
        expected = logits.log_softmax(-1)[:-1].gather(-1, row[1:, None])[len(prompt) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs, dtype=torch.float64), expected)


def test_requests_come_in_the_middle_and_a_long_prompt_stops_no_one() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=30, block_size=3, step_tokens=4)
    first = engine.add([1, 2], max_new_tokens=12, sampling_params=GREEDY)
    assert engine.step() == EngineStep(
        {first: generate(model, [[1, 2]], max_new_tokens=1, temperature=0)[0][0]}, {}, [], {}
    )
    long = list(range(20))
    second = engine.add(long, max_new_tokens=3, sampling_params=GREEDY)
    waited = 0
    while second not in (step := engine.step()).tokens:  # type: ignore[union-attr]
        assert step is not None
        assert list(step.tokens) == [first]
        waited += 1
    assert waited == 6, "20 tokens, 3 in each step beside one of the first request"
    found = engine.run()
    assert found[second].tokens == generate(model, [long], max_new_tokens=3, temperature=0)[0]
    assert found[first].tokens == generate(model, [[1, 2]], max_new_tokens=12, temperature=0)[0]
    assert engine.step() is None


def test_completions_end_by_tokens_and_by_a_function() -> None:
    model = build()
    free = alone(model, 12)
    eos = free[2][4]
    engine = DynamicEngine(model, num_blocks=40, block_size=3, max_sequences=3)
    ask(engine, max_new_tokens=12, eos_id=eos)
    engine.add(PROMPTS[0], max_new_tokens=12, sampling_params=GREEDY, stop=lambda new: list(new[-2:]) == free[0][2:4])
    engine.add(PROMPTS[2], max_new_tokens=12, sampling_params=GREEDY, eos_id=[eos, 59], stop=lambda new: new[-1] == eos)
    found = engine.run()
    expected = alone(model, 12, eos=eos)
    assert tokens_of(found) == [*expected, free[0][:4], expected[2]]
    reasons = ["end" if row[-1] == eos else "length" for row in expected]
    assert [completion.reason for completion in found.values()] == [*reasons, "stop", "end"]
    assert {*reasons} == {"end", "length"}
    assert engine.blocks.free == 40


def test_a_suspended_engine_goes_on_with_new_weights() -> None:
    model, other = build(), build()
    initialize(other, 6)
    engine = DynamicEngine(model, num_blocks=14, block_size=3)
    ask(engine)
    late = engine.add([3, 4, 5], max_new_tokens=4, sampling_params=GREEDY)
    before: dict[int, list[int]] = {number: [] for number in range(5)}
    for _ in range(4):
        step = engine.step()
        assert step is not None
        for number, token in step.tokens.items():
            before[number].append(token)
    rows = [rows for state in engine._scheduler.cache.states.values() for rows in (state.keys, state.values)]
    assert all(each.stored is not None for each in rows)
    engine.suspend()
    assert all(each.stored is None for each in rows), "memory is not given back"
    assert engine.blocks.free == 14
    with pytest.raises(ConfigurationError, match="the engine is suspended and has no cache; call resume"):
        engine.step()
    later = engine.add([9], max_new_tokens=2, sampling_params=GREEDY)
    model.load_state_dict(other.state_dict())
    engine.resume()
    found = engine.run()
    for number, prompt in enumerate([*PROMPTS, [3, 4, 5], [9]]):
        begun = before.get(number, [])
        limit = {late: 4, later: 2}.get(number, 9)
        if len(begun) < limit:
            rest = generate(other, [[*prompt, *begun]], max_new_tokens=limit - len(begun), temperature=0)[0]
            assert found[number].tokens == begun + rest
    assert any(before.values())
    assert engine.blocks.free == 14


def test_texts_begin_again_after_an_error_in_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("hybrid")
    engine = DynamicEngine(model, num_blocks=40, block_size=3, step_tokens=6)
    ask(engine)
    engine.step()
    with monkeypatch.context() as patch:
        # The first layer has read the tokens then.
        patch.setattr(model.layers["1"], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.blocks.free == 40
    assert tokens_of(engine.run()) == alone(model)


def test_draws_come_again_after_an_error_in_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=40)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11 + seed)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("megalight.inference.sampler.sample_tokens", lambda *given, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert tokens_of(engine.run()) == alone(model, seed=11)


def test_a_stop_may_cancel_requests() -> None:
    """Such as the other answers once one is right, or its own."""
    model = build()
    engine = DynamicEngine(model, num_blocks=40)

    def first_wins(new: Sequence[int]) -> bool:
        for number in engine.unfinished[1:]:
            engine.cancel(number)
        return False

    ask(engine, stop=first_wins)
    expected = alone(model)
    assert engine.run() == {0: Completion(expected[0], None, "length")}

    def withdraws(new: Sequence[int]) -> bool:
        engine.cancel(engine.unfinished[0])
        return True

    ask(engine, stop=withdraws)
    assert engine.step() == EngineStep({}, {}, [], {})
    assert engine.step() is None
    assert engine.blocks.free == 40


def raising(length: int, times: int = 1) -> Stop:
    """Ends no text, and raises so many times where one has ``length`` new tokens."""
    errors = [ZeroDivisionError()] * times

    def stop(new: Sequence[int]) -> bool:
        if len(new) == length and errors:
            raise errors.pop()
        return False

    return stop


@pytest.mark.parametrize("length", [2, 6])
def test_nothing_is_lost_by_an_error_in_a_stop(length: int) -> None:
    model = build("hybrid")
    prompts = [[5, 6, 7], [8], [9, 10]]
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "max_new_tokens": 6}
    expected = [generate(model, [prompt], seed=seed, **options)[0] for seed, prompt in enumerate(prompts)]
    engine = DynamicEngine(model, num_blocks=40, block_size=3)
    # 3 ends in the first step, 0 in the step of the error, before it
    news = [length, 6, 6, 1]
    for seed, (prompt, new) in enumerate(zip([*prompts, [1]], news, strict=True)):
        stop = raising(length, 2) if seed == 1 else None
        engine.add(prompt, max_new_tokens=new, sampling_params=SAMPLED, seed=seed, stop=stop)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.run()
        assert engine.unfinished == [0, 1, 2]
    found = engine.run()
    assert [found[number].tokens for number in range(3)] == [expected[0][:length], *expected[1:]]
    assert sorted(found) == [0, 1, 2, 3]
    assert engine.run() == {}
    assert engine.blocks.free == 40


def test_the_step_after_an_error_in_a_stop_says_what_the_first_did() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=40)
    engine.add([5, 6, 7], max_new_tokens=1, sampling_params=GREEDY)
    engine.add([8], max_new_tokens=6, sampling_params=GREEDY, stop=raising(1, 99))
    engine.add([9, 10], max_new_tokens=1, sampling_params=GREEDY)
    engine.add([11], max_new_tokens=1, sampling_params=GREEDY)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.step()
    first, second = [generate(model, [prompt], max_new_tokens=1, temperature=0)[0] for prompt in ([5, 6, 7], [9, 10])]
    engine.cancel(1)
    engine.cancel(3)
    done = {0: Completion(first, None, "length"), 2: Completion(second, None, "length")}
    assert engine.step() == EngineStep({0: first[0], 2: second[0]}, done, [], {})
    assert engine.step() is None
    engine.add([8], max_new_tokens=6, sampling_params=GREEDY, stop=raising(1))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.cancel(4)
    engine.add([5, 6, 7], max_new_tokens=1, sampling_params=GREEDY)
    assert engine.step() == EngineStep({5: first[0]}, {5: done[0]}, [], {})
    assert engine.blocks.free == 40


def test_a_suspended_engine_keeps_the_step_of_an_error_in_a_stop() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=40)
    engine.add([5, 6, 7], max_new_tokens=1, sampling_params=GREEDY)
    engine.add([8], max_new_tokens=4, sampling_params=GREEDY, stop=raising(1))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.suspend()
    assert engine.blocks.free == 40
    engine.resume()
    expected = [generate(model, [prompt], max_new_tokens=4, temperature=0)[0] for prompt in ([5, 6, 7], [8])]
    assert tokens_of(engine.run()) == [expected[0][:1], expected[1]]
    assert engine.blocks.free == 40


def test_a_cancelled_request_gives_its_blocks_back() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=20, block_size=2, max_sequences=2)
    numbers = ask(engine)
    engine.step()
    engine.cancel(numbers[0])  # runs
    engine.cancel(numbers[3])  # waits
    assert engine.unfinished == numbers[1:3]
    expected = alone(model)
    assert engine.run() == {number: Completion(expected[number], None, "length") for number in numbers[1:3]}
    assert engine.blocks.free == 20
    with pytest.raises(DataError, match="no request 0, or it has ended"):
        engine.cancel(0)


def test_new_seeds_differ_and_torchs_random_state_stays() -> None:
    model = build()
    state = torch.get_rng_state()
    engine = DynamicEngine(model, num_blocks=20)
    for _ in range(4):
        engine.add([1, 2], max_new_tokens=20)
    assert len({*map(tuple, tokens_of(engine.run()))}) == 4
    assert torch.equal(state, torch.get_rng_state())


def test_the_mode_of_the_model_stays() -> None:
    model = build().train()
    engine = DynamicEngine(model, num_blocks=20)
    ask(engine)
    engine.run()
    assert model.training
    assert model.layers["0"].training


def poisoned(model: GPT, token: int) -> GPT:
    """A model whose logits are NaN after this token."""
    with torch.no_grad():
        model.embed.word.weight[token] = torch.nan  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "name", ["hybrid", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama", "experts", "mamba"))]
)
def test_a_request_whose_logits_are_nan_fails_alone(name: str, ahead: bool) -> None:
    model = build(**MODELS[name])
    expected = alone(model, seed=11)
    bad = next(token for token in range(20, 61) if not any(token in tokens for tokens in expected))
    engine = DynamicEngine(poisoned(model, bad), num_blocks=9, block_size=3, step_tokens=7)
    engine._passes.runs_ahead = ahead
    numbers: list[int] = []
    for number, prompt in enumerate(PROMPTS):
        engine.add([*prompt, bad], max_new_tokens=9, sampling_params=GREEDY, log_probs=True)
        numbers.append(engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11 + number, log_probs=True))
    found = engine.run()
    assert [found[number].tokens for number in numbers] == expected
    assert [found.pop(number).reason for number in numbers] == ["length"] * 4
    assert {*map(str, found.values())} == {str(Completion([], [], "error"))}
    assert engine.blocks.free == 9
    with pytest.raises(MegalightError, match="the logits after prompt 1 hold NaN or infinity"):
        generate(model, [[5, 6], [bad], [7]], max_new_tokens=3)


def test_a_completion_keeps_its_tokens_when_it_fails() -> None:
    model = build()
    (tokens,) = generate(model, [[5, 6, 7]], max_new_tokens=9, temperature=0)
    place = next(place for place, token in enumerate(tokens) if place and token not in [5, 6, 7, *tokens[:place]])
    engine = DynamicEngine(poisoned(model, tokens[place]), num_blocks=9)
    engine.add([5, 6, 7], max_new_tokens=9, sampling_params=GREEDY)
    assert engine.run() == {0: Completion(tokens[: place + 1], None, "error")}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": [1.5]}, r"a prompt is \[1.5\]; it must be a list of token ids, which are integers"),
        pytest.param({"prompt": "ab"}, "a prompt is 'ab'; it must be a list of token ids", marks=pytest.mark.full),
        ({"prompt": [True]}, r"a prompt is \[True\]"),
        pytest.param({"prompt": [[1, 2]]}, r"a prompt is \[\[1, 2\]\]", marks=pytest.mark.full),
        pytest.param({"prompt": 3}, "a prompt is 3", marks=pytest.mark.full),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be an integer, at least 1"),
        pytest.param({"max_new_tokens": "8"}, "max_new_tokens is '8'", marks=pytest.mark.full),
        pytest.param({"max_new_tokens": True}, "max_new_tokens is True", marks=pytest.mark.full),
        ({"sampling_params": {"temperature": 0}}, "it must be SamplingParams, such as"),
        pytest.param({"sampling_params": 0}, "sampling_params is 0", marks=pytest.mark.full),
        ({"eos_id": 61}, "eos_id is 61; it must be from 0 to 60"),
        pytest.param({"eos_id": [3, -1]}, "eos_id is -1; it must be from 0 to 60", marks=pytest.mark.full),
        pytest.param({"eos_id": 1.5}, "eos_id is 1.5; it must be an integer, from 0 to 60", marks=pytest.mark.full),
        ({"eos_id": "<eos>"}, "eos_id is '<eos>'; it must be an integer, from 0 to 60"),
        ({"stop": "end"}, "stop is 'end'; it must be a function"),
        pytest.param({"seed": -1}, "seed is -1; it must be from 0 to 9223372036854775807", marks=pytest.mark.full),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        pytest.param({"seed": 1.5}, "seed is 1.5; it must be an integer", marks=pytest.mark.full),
        ({"prompt": [torch.tensor(True)]}, r"a prompt is \[tensor\(True\)\]"),
        ({"prompt": b"ab"}, "a prompt is b'ab'; it must be a list of token ids"),
        ({"prompt": {4, 5}}, r"a prompt is {4, 5}; it must be a list of token ids"),
        (
            {"max_new_tokens": torch.tensor(True)},
            r"max_new_tokens is tensor\(True\); it must be an integer, at least 1",
        ),
        ({"eos_id": b"ab"}, "eos_id is b'ab'; it must be an integer, from 0 to 60"),
        ({"n": 0}, "n is 0; it must be from 1 to 65536"),
        ({"n": 2**62}, f"n is {2**62}; it must be from 1 to 65536"),
        ({"log_probs": 5}, "log_probs is 5; it must be True or False. top_log_probs says how many"),
        ({"log_probs": True, "processed_log_probs": "raw"}, "processed_log_probs is 'raw'; it must be True or False"),
        ({"prompt_log_probs": None}, "prompt_log_probs is None; it must be True or False"),
        pytest.param({"n": True}, "n is True; it must be an integer", marks=pytest.mark.full),
        ({"sampling_params": SamplingParams(min_new_tokens=4)}, "min_new_tokens is 4; it must be from 0 to 3"),
        (
            {"sampling_params": SamplingParams(logit_bias={61: 1})},
            "token id of logit_bias is 61; it must be from 0 to 60",
        ),
    ],
)
def test_a_bad_value_is_refused_and_no_other_request_notices(bad: dict[str, Any], message: str) -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=40)
    with pytest.raises((ConfigurationError, DataError), match=message):
        engine.add(**{"prompt": [1], "max_new_tokens": 3} | bad)
    assert ask(engine) == [0, 1, 2, 3]
    assert tokens_of(engine.run()) == alone(model)


def test_integers_of_numpy_and_torch_are_integers() -> None:
    model = build()
    expected = alone(model, seed=11)
    eos = expected[2][4]
    engine = DynamicEngine(model, num_blocks=np.int64(40), block_size=torch.tensor(3))  # type: ignore[arg-type]
    for number, prompt in enumerate(PROMPTS):
        kind: Any = (np.array, torch.tensor)[number % 2]
        more = {"max_new_tokens": kind(9), "eos_id": kind(eos), "seed": kind(11 + number)}
        engine.add(kind(prompt), sampling_params=SAMPLED, **more)
    assert tokens_of(engine.run()) == alone(model, seed=11, eos=eos)


def test_the_error_of_a_stop_names_its_request() -> None:
    engine = DynamicEngine(build(), num_blocks=40)
    engine.add([5], max_new_tokens=2)
    engine.add([5], max_new_tokens=2, stop=raising(1))
    with pytest.raises(ZeroDivisionError) as raised:
        engine.run()
    assert raised.value.__notes__ == ["The stop of request 1 raised it; cancel it to go on without."]


def test_bad_requests_and_models_are_refused() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=4, block_size=3)
    assert engine.step() is None
    engine.add([1] * 7, max_new_tokens=6)
    with pytest.raises(DataError, match=r"7 tokens and 7 new ones need 5 blocks of 3 tokens, and the cache has 4"):
        engine.add([1] * 7, max_new_tokens=7)
    with pytest.raises(DataError, match="exceed max_sequence_length = 40"):
        engine.add([1] * 7, max_new_tokens=34)
    with pytest.raises(DataError, match="a prompt is empty"):
        engine.add([], max_new_tokens=1)
    with pytest.raises(DataError, match="token 61 is outside"):
        engine.add([61], max_new_tokens=1)
    with pytest.raises(ConfigurationError, match="max_new_tokens is 0"):
        engine.add([1], max_new_tokens=0)
    assert engine.unfinished == [0]
    for name in ("num_blocks", "block_size", "max_sequences", "step_tokens"):
        for value in (0, 2.5, True, "8", 2**63):
            with pytest.raises(ConfigurationError, match=rf"{name} is {value!r}; it must be .*from 1 to \d+\."):
                DynamicEngine(model, **{"num_blocks": 4, name: value})  # type: ignore[arg-type]
    for bad, error, message in (
        ({"attention_backend": None}, BackendError, "paged_attention has no backend None; it has triton"),
        ({"speculator": "ngram"}, ConfigurationError, "speculator is 'ngram'; it must be a Speculator, such as NGram"),
        ({"batch_invariant": "no"}, ConfigurationError, "batch_invariant is 'no'; it must be True or False"),
        ({"first_rank_only": "no"}, ConfigurationError, "first_rank_only is 'no'; it must be True or False"),
    ):
        with pytest.raises(error, match=message):
            DynamicEngine(model, **{"num_blocks": 4} | bad)  # type: ignore[arg-type]
    for name in ("keep_cache", "weights"):
        with pytest.raises(ConfigurationError, match=f"{name} is 'no'; it must be True or False"):
            engine.suspend(**{name: "no"})  # type: ignore[arg-type]
    for moe in (
        replace(MOE, capacity=CapacityConfig(factor=1.0)),
        replace(MOE, router=RouterConfig(force_balance=True)),
    ):
        with pytest.raises(ConfigurationError, match="requests would change each other"):
            DynamicEngine(build(moe=moe), num_blocks=4)
