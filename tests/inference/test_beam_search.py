"""Beam search: against all completions, and against greedy text."""

from __future__ import annotations

import pytest

from megalight.errors import ConfigurationError
from megalight.inference import DynamicEngine, generate
from megalight.inference.beam_search import beam_search
from tests.inference.test_generate import PROMPTS, build, last_logits


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_a_search_as_wide_as_the_vocabulary_finds_the_best_of_all(penalty: float) -> None:
    model, ends = build(), [3, 40]
    first = last_logits(model, [PROMPTS[0]]).log_softmax(-1)[0].tolist()
    second = last_logits(model, [[*PROMPTS[0], token] for token in range(61)]).log_softmax(-1).tolist()
    every = [(first[token], [token]) for token in ends]
    every += [((first[a] + second[a][b]) / 2**penalty, [a, b]) for a in range(61) if a not in ends for b in range(61)]
    engine = DynamicEngine(model, num_blocks=80, block_size=2)
    found = beam_search(engine, PROMPTS[0], width=61, max_new_tokens=2, eos_id=ends, length_penalty=penalty)
    expected = sorted(every, reverse=True)[:61]
    assert [beam.tokens for beam in found] == [tokens for _, tokens in expected]
    assert [beam.score for beam in found] == pytest.approx([score for score, _ in expected], abs=1e-12)
    assert engine.blocks.free == 80


def test_a_wider_search_finds_no_worse_text_than_greedy() -> None:
    model, scores = build(), []
    for width in (1, 4):
        found = beam_search(DynamicEngine(model, num_blocks=40), PROMPTS[2], width=width, max_new_tokens=8)
        assert len(found) == width
        scores.append(found[0].score)
        if width == 1:
            assert found[0].tokens == generate(model, [PROMPTS[2]], max_new_tokens=8, temperature=0)[0]
    assert scores[1] >= scores[0]


def test_an_engine_with_requests_and_wrong_numbers_are_refused() -> None:
    engine = DynamicEngine(build(), num_blocks=40)
    for bad in (float("nan"), float("inf"), -1e9, True, "1", None):
        with pytest.raises(ConfigurationError, match=f"length_penalty is {bad!r}; it must be a number from -50 to 50"):
            beam_search(engine, [1], width=2, max_new_tokens=2, length_penalty=bad)  # type: ignore[arg-type]
    for bad in (0, 1.5, True):
        with pytest.raises(ConfigurationError, match=f"width is {bad!r}; it must be"):
            beam_search(engine, [1], width=bad, max_new_tokens=2)  # type: ignore[arg-type]
    engine.add([1], max_new_tokens=2)
    with pytest.raises(ConfigurationError, match="the engine has other requests"):
        beam_search(engine, [1], width=2, max_new_tokens=2)
