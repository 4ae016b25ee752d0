"""Recorded steps: texts are those of steps that are not recorded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megalight.errors import ConfigurationError
from megalight.inference import DynamicEngine
from megalight.inference.batch_dimensions import InferenceBatchDimensions
from megalight.inference.graphs import StepGraphs
from tests.inference.test_engine import MODELS, PROMPTS, SAMPLED, alone, tokens_of
from tests.inference.test_generate import build
from tests.parallel.graphs.tape import Tape

RECURRENT = ("hybrid", "mamba", "delta")
D = InferenceBatchDimensions
DIMENSIONS = [D(8, 5, 0), D(6, 2, 3), D(4, 1, 2), D(5, 0, 5), D(2, 0, 2)]


def recording(engine: DynamicEngine, dimensions: Sequence[D], tape: Tape | None = None) -> StepGraphs:
    """Let an engine on the CPU record its steps on tapes, and run ahead as on a GPU."""
    passes, cache = engine._passes, engine._scheduler.cache
    graphs = passes.graphs = StepGraphs(engine._model, cache, passes.newest, dimensions, tape or Tape())  # type: ignore[arg-type]
    passes.runs_ahead = True
    return graphs


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        *[("llama", DIMENSIONS[:count]) for count in (1, 2)],
        *[(name, DIMENSIONS) for name in ("llama", "windowed", "latent", "sinks", "hybrid", "mamba", "experts")],
        *[pytest.param(name, DIMENSIONS, marks=pytest.mark.full) for name in ("gpt2", "tempered", "delta", "capped")],
    ],
)
def test_completions_are_those_of_each_prompt_alone(name: str, dimensions: list[D], poison: None) -> None:
    """With 1, 2 or N graphs: padding changes nothing, prompts run in parts, and blocks move between replays."""
    model = build(**MODELS[name])
    engine, tape = DynamicEngine(model, num_blocks=20, block_size=3, max_sequences=5, step_tokens=6), Tape()
    graphs = recording(engine, dimensions, tape)
    expected = alone(model, seed=11)
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS):
            new = 9 - 4 * (number == turn)
            engine.add(prompt, max_new_tokens=new, sampling_params=SAMPLED, seed=11 + number)
        if turn:
            engine.create_cuda_graphs()
            assert [*graphs._steps] == graphs.dimensions
        found = tokens_of(engine.run())
        assert found == [text[: len(got)] for text, got in zip(expected, found, strict=True)]
        # a graph goes with the pools, and is made again
        engine.suspend()
        assert not tape.tapes
        engine.resume()
    assert graphs.dimensions == [each for each in dimensions if name not in RECURRENT or not each.prefill_req_count]
    assert {*engine.graph_uses} <= {*graphs.dimensions}
    prompts = sum(count for used, count in engine.graph_uses.items() if used.prefill_req_count)
    assert prompts > 3 if name not in RECURRENT else not prompts
    if len(dimensions) > 2:
        assert engine.graph_uses[D(5, 0, 5)] > 8
    assert engine.blocks.free == 20


def test_a_step_that_cannot_be_recorded_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    model, tape = build(), Tape()
    tape.fail_at = 1
    engine = DynamicEngine(model, num_blocks=40)
    recording(engine, [D(4, 0, 4)], tape)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11)
    assert all(len(tokens) == 9 for tokens in tokens_of(engine.run()))
    assert "cannot be recorded" in caplog.text
    assert engine.graph_uses == {}


def test_a_number_of_graphs_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="cuda_graphs is -1"):
        DynamicEngine(build(), num_blocks=4, cuda_graphs=-1)
