"""Recorded steps: texts are those of steps that are not recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.inference import Completion, DynamicEngine, SamplingParams
from megalight.inference.batch_dimensions import InferenceBatchDimensions, with_draft_tokens
from megalight.inference.fp8_weights import quantize_weights
from megalight.inference.graphs import StepGraphs
from megalight.inference.scheduler import Request
from megalight.inference.speculator import DraftSpeculator, EagleSpeculator, Speculator
from tests.inference.test_engine import MODELS, PROMPTS, SAMPLED, alone, tokens_of
from tests.inference.test_generate import build
from tests.inference.test_speculator import Told, draft_of
from tests.parallel.graphs.tape import Tape
from tests.support.fake_driver import fake_driver

D = InferenceBatchDimensions
DIMENSIONS = [D(8, 5, 0), D(6, 2, 3), D(4, 1, 2), D(5, 0, 5), D(2, 0, 2)]


def recording(engine: DynamicEngine, dimensions: Sequence[D], tape: Tape | None = None) -> StepGraphs:
    """Let an engine on the CPU record its steps on tapes, and run ahead as on a GPU."""
    passes, cache = engine._passes, engine._scheduler.cache
    graphs = passes.graphs = StepGraphs(engine._model, cache, passes.newest, dimensions, tape or Tape())  # type: ignore[arg-type]
    passes.runs_ahead = passes.stages == 1
    return graphs


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        *[("llama", DIMENSIONS[:count]) for count in (1, 2)],
        *[(name, DIMENSIONS) for name in ("windowed", "latent", "hybrid", "experts", "mamba", "delta")],
        *[
            pytest.param(name, DIMENSIONS, marks=pytest.mark.full)
            for name in ("llama", "sinks", "gpt2", "tempered", "capped")
        ],
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
        if not turn:  # after a suspend they are recorded when they are needed
            engine.create_cuda_graphs()
            assert [*graphs._steps] == graphs.dimensions
        found = tokens_of(engine.run())
        assert found == [text[: len(got)] for text, got in zip(expected, found, strict=True)]
        # a graph goes with the pools, and is made again
        engine.suspend()
        assert not tape.tapes
        engine.resume()
    assert {*engine.step_log.graph_uses} <= {*graphs.dimensions}
    prompts = sum(count for used, count in engine.step_log.graph_uses.items() if used.prefill_req_count)
    assert prompts > 3
    if len(dimensions) > 2:
        assert engine.step_log.graph_uses[D(5, 0, 5)] > 8
    assert engine.blocks.free == 20


class Watched:
    """A speculator, and all that it has guessed."""

    def __init__(self, speculator: Speculator) -> None:
        self.found: list[list[list[int]]] = []
        guess = speculator.propose

        def watched(requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
            found = guess(requests, counts)
            self.found.append([row[:count] for row, count in zip(found.tolist(), counts, strict=True)])
            return found

        speculator.propose = watched  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("llama", kind) for kind in ("told", "eagle", "small")],
        *[
            pytest.param(name, kind, marks=pytest.mark.full)
            for name in ("latent", "experts")
            for kind in ("told", "eagle")
        ],
    ],
)
def test_steps_with_draft_tokens_are_recorded(name: str, kind: str, poison: None) -> None:
    """Texts, and what a draft guesses, are those of steps that are not recorded, with whatever settings."""
    model = build(**MODELS[name])
    expected = alone(model, 14, seed=11)

    def run(recorded: bool, ahead: bool = False) -> tuple[list[list[int]], list[list[list[int]]], dict[D, int]]:
        speculator: Speculator = Told([*expected, [], []], 3)
        if kind == "eagle":
            speculator = EagleSpeculator(draft_of(model), model, 3)
        elif kind == "small":
            small = build(**MODELS["windowed"])
            speculator = DraftSpeculator(small, model, 3, max_sequences=5)
        watched = Watched(speculator)
        engine = DynamicEngine(
            model, num_blocks=20, block_size=3, max_sequences=5, step_tokens=9, speculator=speculator
        )
        engine._passes.runs_ahead = ahead
        if recorded:
            dimensions = with_draft_tokens([D(5, 0, 5), D(2, 0, 2)], speculator.num_speculative_tokens, 99)
            cache, newest = engine._scheduler.cache, engine._passes.newest
            engine._passes.graphs = StepGraphs(model, cache, newest, dimensions, Tape(), speculator)  # type: ignore[arg-type]
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_new_tokens=14, sampling_params=SAMPLED, seed=11 + number)
        params = SamplingParams(temperature=0.8, presence_penalty=0.5, min_new_tokens=3)
        engine.add(PROMPTS[1], max_new_tokens=9, sampling_params=params, eos_id=[3, 4], seed=5)
        engine.add(PROMPTS[2], max_new_tokens=6, sampling_params=SAMPLED, seed=7, log_probs=True)
        found: dict[int, Completion] = {}
        for turn, step in enumerate(engine):
            found |= step.finished
            if turn == 12:
                if recorded and kind != "told":
                    assert speculator.loop is not None
                    assert sum(each.recording.replays for each in speculator.loop._graphs.values()) > 5  # type: ignore[attr-defined]
                engine.suspend(keep_cache=True)
                engine.resume()
        return tokens_of(dict(sorted(found.items()))), watched.found, engine.step_log.graph_uses

    plain, guessed, _ = run(False)
    assert plain[:4] == expected
    texts, guesses, uses = run(True)
    assert texts == plain
    assert guesses == guessed
    assert sum(count for used, count in uses.items() if used.prefill_req_count) > 5
    assert run(True, ahead=True)[0] == plain


@pytest.mark.parametrize("kind", ["eagle", "small"])
def test_the_loop_of_a_draft_survives_a_suspend(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tape = build(), Tape()
    expected = alone(model, seed=11)
    speculator: Speculator = EagleSpeculator(draft_of(model), model, 3)
    if kind == "small":
        speculator = DraftSpeculator(build(**MODELS["windowed"]), model, 3, max_sequences=5)
    with fake_driver(tmp_path, monkeypatch) as driver:
        engine = DynamicEngine(model, num_blocks=20, block_size=3, max_sequences=5, speculator=speculator)
        dimensions = with_draft_tokens([D(5, 0, 5)], speculator.num_speculative_tokens, 99)
        cache, passes = engine._scheduler.cache, engine._passes
        passes.graphs = StepGraphs(model, cache, passes.newest, dimensions, tape, speculator)  # type: ignore[arg-type]
        engine.create_cuda_graphs()
        engine.suspend(weights=True)  # those of the draft, too
        engine.resume()
        assert not tape.tapes
        engine.create_cuda_graphs()
        made = tape.made
        for turn in range(2):
            for number, prompt in enumerate(PROMPTS):
                engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11 + number)
            found: dict[int, Completion] = {}
            for count, step in enumerate(engine):
                found |= step.finished
                if count in (2, 5):
                    engine.suspend(keep_cache=count == 2 * turn, weights=count == 5)
                    assert (driver.mapped == 0) == (count == 5)
                    engine.resume()
            assert tokens_of(dict(sorted(found.items()))) == expected
        assert tape.made == made == 2 * len(tape.tapes)
        assert speculator.loop is not None
        assert sum(each.recording.replays for each in speculator.loop._graphs.values()) > 5  # type: ignore[attr-defined]
        assert speculator.draft is not None
        engine.suspend()
        weight = next(speculator.draft.parameters())
        weight.data = weight.data.clone()
        engine.resume()
        assert not tape.tapes
        del engine, cache, passes, speculator, step
        tape.tapes.clear()


def test_a_step_that_cannot_be_recorded_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    model, tape = build(), Tape()
    tape.fail_at = 1
    engine = DynamicEngine(model, num_blocks=40)
    recording(engine, [D(4, 0, 4)], tape)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11)
    assert all(len(tokens) == 9 for tokens in tokens_of(engine.run()))
    assert "cannot be recorded" in caplog.text
    assert engine.step_log.graph_uses == {}


def test_a_number_of_graphs_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="cuda_graphs is -1"):
        DynamicEngine(build(), num_blocks=4, cuda_graphs=-1)


@pytest.mark.parametrize("name", ["llama", "latent"])
def test_texts_of_weights_and_caches_in_8_bits_are_those_without_graphs(name: str, tmp_path: Path) -> None:
    model = build(**MODELS[name])
    quantize_weights(model)
    found = []
    for count in (0, 1, len(DIMENSIONS)):
        log = tmp_path / f"{count}.jsonl"
        options = {"num_blocks": 20, "block_size": 3, "max_sequences": 5, "step_tokens": 6}
        engine = DynamicEngine(model, **options, kv_cache_dtype="fp8", step_log=log)  # type: ignore[arg-type]
        if count:
            recording(engine, DIMENSIONS[:count])
            engine.create_cuda_graphs()
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=number)
        found.append(tokens_of(engine.run()))
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert sum(line["graph"] is not None for line in lines) == engine.step_log.graph_uses.total()
        assert bool(engine.step_log.graph_uses) == (count > 0)
    assert found[1:] == found[:1] * 2


def test_steps_are_logged_with_their_dimensions_and_graphs(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = DynamicEngine(build(), num_blocks=20, block_size=3, step_tokens=6, step_log=path)
    recording(engine, [D(6, 2, 2), D(4, 0, 4)])
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=5)
    engine.run()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, engine.step_log.steps + 1)]
    # 3, 1 and 2 of 7 tokens; then 1, 1 and 4
    first, second = ({name: line[name] for name in vars(D(0, 0, 0))} for line in lines[:2])
    assert (first, second) == (vars(D(6, 3, 0)), vars(D(6, 1, 2)))
    assert sum(line["token_count"] for line in lines) == sum(map(len, PROMPTS)) + 4 * len(PROMPTS)
    graphs = [line["graph"] for line in lines if line["graph"] is not None]
    assert graphs[-1] == {**vars(D(4, 0, 4)), "uses": engine.step_log.graph_uses[D(4, 0, 4)]}
    assert len(graphs) == engine.step_log.graphed
    assert all(line["seconds"] >= line["wait_seconds"] >= 0 for line in lines)
    assert engine.step_log.last is not None
    assert engine.step_log.last.seconds == pytest.approx(lines[-1]["seconds"], abs=1e-6)
