"""Recorded decode steps: texts are those of steps that are not recorded."""

from __future__ import annotations

import pytest

from megalight.errors import ConfigurationError
from megalight.inference import DynamicEngine
from megalight.inference.graphs import DecodeGraphs, graph_sizes
from tests.inference.test_engine import MODELS, PROMPTS, SAMPLED, alone, tokens_of
from tests.inference.test_generate import build
from tests.parallel.graphs.tape import Tape


def test_sizes_are_those_of_megatron_and_three_small_ones() -> None:
    assert graph_sizes(1000, 4) == [1000, 768, 512, 256, 4, 2, 1]
    assert graph_sizes(256, 16) == [*range(256, 0, -16), 4, 2, 1]
    assert graph_sizes(3, 1) == [3, 2, 1]
    assert graph_sizes(64, 1) == [64, 4, 2, 1]


@pytest.mark.parametrize("name", ["llama", "windowed", "latent", "gpt2", "hybrid", "mamba", "delta"])
@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.full), True])
def test_completions_are_those_of_each_prompt_alone(name: str, ahead: bool) -> None:
    """Rows that a graph has beyond those of the step change nothing, and blocks move between replays."""
    model = build(**MODELS[name])
    engine, tape = DynamicEngine(model, num_blocks=20, block_size=3, max_sequences=5), Tape()
    cache = engine._scheduler.cache
    engine._passes.graphs = DecodeGraphs(model, cache, engine._passes.newest, [5, 2], tape)
    engine._passes.runs_ahead = ahead
    expected = alone(model, seed=11)
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS):
            new = 9 - 4 * (number == turn)
            engine.add(prompt, max_new_tokens=new, sampling_params=SAMPLED, seed=11 + number)
        found = tokens_of(engine.run())
        assert found == [text[: len(got)] for text, got in zip(expected, found, strict=True)]
        # a graph goes with the pools, and is made again
        engine.suspend()
        assert not engine._passes.graphs._steps
        engine.resume()
    assert engine.graph_uses[5] > 8
    assert tape.made == 2
    assert engine.blocks.free == 20


def test_a_step_that_cannot_be_recorded_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    model, tape = build(), Tape()
    tape.fail_at = 1
    engine = DynamicEngine(model, num_blocks=40)
    engine._passes.graphs = DecodeGraphs(model, engine._scheduler.cache, engine._passes.newest, [4], tape)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11)
    assert all(len(tokens) == 9 for tokens in tokens_of(engine.run()))
    assert "cannot be recorded" in caplog.text
    assert engine.graph_uses == {}


def test_a_number_of_graphs_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="cuda_graphs is -1"):
        DynamicEngine(build(), num_blocks=4, cuda_graphs=-1)
