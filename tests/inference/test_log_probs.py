"""Log-probabilities of prompts and completions: those of a whole pass, however the engine runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.inference import DynamicEngine, SamplingParams
from megalight.models.gpt import GPT
from megalight.types import PackedSequences
from tests.inference.test_engine import MODELS
from tests.inference.test_generate import PROMPTS, build

LONG = [*range(9, 26), 9, 10]


def whole_logits(model: GPT, row: list[int]) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor(row), PackedSequences.of_lengths([len(row)])).logits
    assert isinstance(logits, Tensor)
    return logits


def scores(model: GPT, row: list[int]) -> list[float]:
    """Of all tokens but the first."""
    found = whole_logits(model, row).log_softmax(-1)[:-1].gather(-1, torch.tensor(row[1:])[:, None])
    return [float(value) for value in found]


@pytest.mark.parametrize("name", ["llama", "mamba", "experts"])
@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_are_scored_in_parts_beside_shared_prefixes(name: str, ahead: bool) -> None:
    model = build(**MODELS[name])
    engine = DynamicEngine(model, num_blocks=22, block_size=3, max_sequences=4, step_tokens=7)
    engine._passes.runs_ahead = ahead
    shared, preempted = 0, 0
    prompts = [LONG, LONG, LONG, LONG[:1], PROMPTS[2], LONG]
    numbers = [
        engine.add(prompt, max_new_tokens=6, seed=number, log_probs=True, prompt_log_probs=number != 1)
        for number, prompt in enumerate(prompts)
    ]
    done: dict[int, Any] = {}
    for count, step in enumerate(engine):
        shared += step.shared.get(numbers[1], 0)
        preempted += len(step.preempted)
        assert count > 1 or {*step.shared} <= {numbers[1]}, "a prompt that is to be scored shares tokens"
        done |= step.finished
        if count == 1:  # in the middle of a prompt
            engine.suspend()
            engine.resume()
    assert shared, "nothing is shared"
    for number, prompt in zip(numbers, prompts, strict=True):
        expected = scores(model, [*prompt, *done[number].tokens])
        assert done[number].log_probs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-11)
        if number == 1:
            assert done[number].prompt_log_probs is None
        else:
            assert done[number].prompt_log_probs == pytest.approx(expected[: len(prompt) - 1], abs=1e-11)


def test_the_most_probable_tokens_have_theirs_raw_or_processed() -> None:
    model = build()
    params = SamplingParams(temperature=0.7, top_k=5, frequency_penalty=1.5, logit_bias={9: 3.0})
    engine = DynamicEngine(model, num_blocks=40)
    options: dict[str, Any] = {"max_new_tokens": 5, "sampling_params": params, "seed": 4, "log_probs": True}
    raw = engine.add(PROMPTS[0], top_log_probs=3, **options)
    processed = engine.add(PROMPTS[0], top_log_probs=7, processed_log_probs=True, **options)
    greedy = engine.add(
        PROMPTS[0],
        max_new_tokens=5,
        log_probs=True,
        processed_log_probs=True,
        sampling_params=SamplingParams(temperature=0),
    )
    found = engine.run()
    assert found[raw].tokens == found[processed].tokens
    tokens = found[raw].tokens
    rows = whole_logits(model, [*PROMPTS[0], *tokens])[len(PROMPTS[0]) - 1 : -1]
    changed = rows.clone()
    for place in range(5):
        for token in tokens[:place]:
            changed[place, token] -= 1.5
        changed[place, 9] += 3.0
    least = changed.topk(5).values[:, -1:]
    changed = (changed / 0.7).masked_fill(changed < least, -torch.inf)
    for number, logits, count in ((raw, rows, 3), (processed, changed, 7)):
        expected = logits.log_softmax(-1)
        assert found[number].log_probs == pytest.approx(
            [float(expected[n, t]) for n, t in enumerate(tokens)], abs=1e-11
        )
        top = found[number].top_log_probs
        assert top is not None
        for row, each in zip(expected, top, strict=True):
            values, ids = row.topk(count)
            fine = values.isfinite()
            assert [*each][: int(fine.sum())] == ids[fine].tolist()
            assert [*each.values()] == pytest.approx(values.tolist(), abs=1e-11)
    expected = scores(model, [*PROMPTS[0], *found[greedy].tokens])[len(PROMPTS[0]) - 1 :]
    assert found[greedy].log_probs == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"top_log_probs": 62, "log_probs": True}, "top_log_probs is 62; it must be from 0 to 61"),
        ({"top_log_probs": 2}, "but log_probs is False"),
        ({"processed_log_probs": True}, "but log_probs is False"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DynamicEngine(build(), num_blocks=4).add([1], max_new_tokens=2, **bad)
