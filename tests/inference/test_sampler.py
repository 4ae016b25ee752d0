"""Texts of requests with all settings of sampling: those that each prompt alone becomes, computed step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.inference import Completion, DynamicEngine, SamplingParams, generate, sample
from megalight.inference.batch_dimensions import InferenceBatchDimensions
from megalight.inference.graphs import StepGraphs
from megalight.inference.speculator import EagleSpeculator, NGramSpeculator
from megalight.models.gpt import GPT
from tests.inference.test_generate import PROMPTS, build, last_logits
from tests.inference.test_speculator import Told, draft_of
from tests.parallel.graphs.tape import Tape

EOS = (3, 4)
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.7},
    {"temperature": 0, "presence_penalty": 2.5, "min_new_tokens": 6},
    {"temperature": 0.8, "frequency_penalty": 1.5, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.05, "logit_bias": {7: 4.0, 8: -torch.inf, 60: -3.0}},
    {"temperature": 0.9, "repetition_penalty": 0.8, "presence_penalty": -0.4, "top_p": 0.9, "logit_bias": {3: 9.0}},
    {"temperature": 1.0, "logit_bias": {3: 50.0, 4: 49.0}, "min_new_tokens": 4},
    {},
    {"temperature": 0, "repetition_penalty": 0.1},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.8, "min_p": 0.02, "presence_penalty": 0.5, "min_new_tokens": 2},
]


def kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits ``[V]`` of the tokens that top-k, then top-p of what is left, and min-p keep, by their definitions."""
    probabilities = (logits / params.temperature).softmax(-1)
    likely = probabilities.argsort(descending=True).tolist()[: params.top_k]
    total, left = sum(float(probabilities[token]) for token in likely), set[int]()
    before = 0.0
    for token in likely:
        if params.top_p is None or before < params.top_p:
            left.add(token)
        before += float(probabilities[token]) / total
    least = params.min_p * float(probabilities.max())
    out = [token for token in range(len(logits)) if token not in left or probabilities[token] < least]
    return logits.index_fill(0, torch.tensor(out, dtype=torch.int64), -torch.inf)


def text(model: GPT, prompt: list[int], seed: int, new: int, settings: dict[str, Any]) -> list[int]:
    """The completion, by the formulas, one token at a time."""
    params, found = SamplingParams(**settings), list[int]()
    plain = SamplingParams(temperature=params.temperature)
    for _ in range(new):
        (logits,) = last_logits(model, [prompt + found])
        for token in {*prompt, *found}:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in {*found}:
            logits[token] -= params.presence_penalty + params.frequency_penalty * found.count(token)
        for token, value in params.logit_bias.items():
            logits[token] += value
        if len(found) < params.min_new_tokens:
            logits[list(EOS)] = -torch.inf
        logits = kept(logits, params) if params.temperature else logits
        place = torch.tensor([len(prompt) + len(found)])
        found.append(int(sample(logits[None], plain, torch.tensor([seed]), place)))
        if found[-1] in EOS:
            break
    return found


def expected(model: GPT, new: int = 10) -> list[list[int]]:
    return [text(model, PROMPTS[n % 4], 30 + n, new, settings) for n, settings in enumerate(SETTINGS)]


def ask(engine: DynamicEngine) -> None:
    for number, settings in enumerate(SETTINGS):
        engine.add(
            PROMPTS[number % 4],
            max_new_tokens=10,
            sampling_params=SamplingParams(**settings),
            seed=30 + number,
            eos_id=EOS,
            log_probs=number == 2,
        )


def tokens_of(found: dict[int, Completion]) -> list[list[int]]:
    return [found[number].tokens for number in sorted(found)]


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 0.3},
        {"top_k": 3},
        {"top_p": 0.4},
        {"min_p": 0.3},
        {"repetition_penalty": 0.05},
        {"presence_penalty": -9.0},
        {"frequency_penalty": -9.0},
        {"logit_bias": {7: 9.0}},
        {"logit_bias": dict.fromkeys(EOS, 9.0), "min_new_tokens": 3},
    ],
    ids=lambda field: [*field][-1],
)
def test_each_setting_alone_changes_texts(field: dict[str, Any]) -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=60)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, max_new_tokens=8, sampling_params=SamplingParams(**field), seed=seed, eos_id=EOS)
    found = tokens_of(engine.run())
    assert found == [text(model, prompt, seed, 8, field) for seed, prompt in enumerate(PROMPTS)]
    less = {name: value for name, value in field.items() if name != [*field][-1]}
    assert found != [text(model, prompt, seed, 8, less) for seed, prompt in enumerate(PROMPTS)], "it has no effect"


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_of_a_pass_that_is_forgotten_are_not_penalized(ahead: bool) -> None:
    """A second text, which goes on, may not find what the first one leaves in its slot, either."""
    model = build()
    settings: dict[str, Any] = {"temperature": 0, "frequency_penalty": 3.0, "repetition_penalty": 1.5}
    engine = DynamicEngine(model, num_blocks=60)
    engine._passes.runs_ahead = ahead
    found: dict[int, Completion] = {}
    for _ in range(2):
        engine.add(PROMPTS[1], max_new_tokens=10, sampling_params=SamplingParams(**settings))
        while engine.unfinished:
            step = engine.step()
            assert step is not None
            found |= step.finished
            engine.reset_cache()
    assert tokens_of(found) == [text(model, PROMPTS[1], 0, 10, settings)] * 2


def test_generate_samples_by_all_settings() -> None:
    model = build()
    for number, (settings, wanted) in enumerate(zip(SETTINGS, expected(model), strict=True)):
        found = generate(model, [PROMPTS[number % 4]], max_new_tokens=10, eos_id=EOS, seed=30 + number, **settings)
        assert found == [wanted]
    assert {len(each) for each in expected(model)} != {10}, "no text ends early"


@pytest.mark.parametrize(
    ("ahead", "graphs"),
    [
        (False, False),
        (True, True),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((False, True), (True, False))),
    ],
)
def test_requests_sample_by_their_own_settings(ahead: bool, graphs: bool) -> None:
    """Whoever else runs, with preemption, parts of prompts, cancelled requests, and a cache that is given back."""
    model = build()
    engine = DynamicEngine(model, num_blocks=12, block_size=3, max_sequences=4, step_tokens=5)
    engine._passes.runs_ahead = ahead
    if graphs:
        dimensions = [InferenceBatchDimensions(5, 2, 2), *(InferenceBatchDimensions(n, 0, n) for n in (4, 2))]
        engine._passes.graphs = StepGraphs(model, engine._scheduler.cache, engine._passes.newest, dimensions, Tape())
    preempted = 0
    for turn in range(2):
        # It takes a slot first, and leaves its counts there.
        lost = engine.add([5, 6], max_new_tokens=9, sampling_params=SamplingParams(frequency_penalty=2), seed=1)
        ask(engine)
        done: dict[int, Completion] = {}
        for count, step in enumerate(engine):
            preempted += len(step.preempted)
            done |= step.finished
            if count == 2:
                engine.cancel(lost)
            if turn and count == 6:
                engine.suspend()
                engine.resume()
        assert tokens_of(done) == expected(model)
    assert preempted


def test_several_completions_of_a_prompt_have_their_own_seeds() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=40, block_size=3)
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    first = engine.add(PROMPTS[2], max_new_tokens=8, sampling_params=params, seed=2**63 - 2, n=3)
    other = engine.add(PROMPTS[0], max_new_tokens=2)
    assert (first, other) == (0, 3)
    step = engine.step()
    assert step is not None
    assert step.shared == {1: 6, 2: 6}
    texts = tokens_of(engine.run())[:3]
    settings = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    assert texts == [text(model, PROMPTS[2], seed, 8, settings) for seed in (2**63 - 2, 2**63 - 1, 0)]


def test_settings_of_the_engine_hold_for_requests_without_their_own_and_warn() -> None:
    model = build()
    with pytest.warns(UserWarning, match="give them to each request"):
        engine = DynamicEngine(model, num_blocks=40, sampling_params=SamplingParams(**SETTINGS[0]))
    engine.add(PROMPTS[0], max_new_tokens=8)
    engine.add(PROMPTS[1], max_new_tokens=8, sampling_params=SamplingParams(), seed=3)
    found = tokens_of(engine.run())
    assert found == [text(model, PROMPTS[0], 0, 8, SETTINGS[0]), text(model, PROMPTS[1], 3, 8, {})]


def test_a_function_may_end_a_completion_after_its_least_tokens() -> None:
    engine = DynamicEngine(build(), num_blocks=40)
    asked: list[int] = []

    def stop(new: Any) -> bool:
        asked.append(len(new))
        return True

    engine.add([5], max_new_tokens=9, sampling_params=SamplingParams(min_new_tokens=3), stop=stop, seed=1)
    assert [len(found.tokens) for found in engine.run().values()] == [3]
    assert asked == [1, 2, 3]


@pytest.mark.full
def test_guesses_change_no_text_whatever_the_settings() -> None:
    model = build()
    wanted = expected(model)
    for speculator in (
        *(Told(wanted, wrong) for wrong in (99, 3, 1)),
        NGramSpeculator(3, shortest=1),
        EagleSpeculator(draft_of(model), model),
    ):
        engine = DynamicEngine(
            model, num_blocks=12, block_size=3, max_sequences=4, step_tokens=9, speculator=speculator
        )
        for ahead in (False, True):
            engine._passes.runs_ahead = ahead
            ask(engine)
            assert tokens_of(engine.run()) == wanted
        assert engine.draft_rounds.drafted
    for number in (0, 3):
        options: dict[str, Any] = {"max_new_tokens": 10, "eos_id": EOS, "seed": 30 + number, "draft": draft_of(model)}
        assert generate(model, [PROMPTS[number % 4]], **options, **SETTINGS[number]) == [wanted[number]]


def test_biases_leave_log_probabilities_to_the_model() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=40)
    params = SamplingParams(temperature=0.5, logit_bias={9: 40.0}, repetition_penalty=1.1)
    engine.add(PROMPTS[0], max_new_tokens=2, sampling_params=params, log_probs=True, seed=1)
    (found,) = engine.run().values()
    assert found.tokens[0] == 9
    wanted = last_logits(model, [PROMPTS[0]]).log_softmax(-1)[0, 9].item()
    assert found.log_probs is not None
    assert found.log_probs[0] == pytest.approx(wanted, abs=1e-12)
