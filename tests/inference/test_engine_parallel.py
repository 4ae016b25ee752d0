"""The engine on a model that is divided over ranks: every rank gets the completions of one device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import megalight
from megalight.errors import ConfigurationError, MegalightError
from megalight.inference import Completion, DynamicEngine, ParallelGPT, SamplingParams, generate
from megalight.nn.init import initialize
from tests.inference.test_engine import raising
from tests.inference.test_generate_parallel import LAYOUTS, PP, PROMPTS, SP, divided, one_device
from tests.inference.test_sampler import EOS, SETTINGS
from tests.parallel.expert.model import build
from tests.support.fake_driver import FakeDriver, fake_driver
from tests.support.workers import run


def ask(model: Any) -> Any:
    """All that the steps do, with a pool that forces preemption and prompts that run in parts."""
    engine = DynamicEngine(model, num_blocks=8, block_size=3, step_tokens=5)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, max_new_tokens=9, sampling_params=SamplingParams(temperature=0), log_probs=True)
        engine.add(prompt, max_new_tokens=5, sampling_params=SamplingParams(temperature=0.7, top_p=0.9), seed=seed)
    steps = list(engine)
    done = {number: completion for step in steps for number, completion in step.finished.items()}
    logs = torch.tensor([done[number].log_probs for number in range(0, 8, 2)], dtype=torch.float64)
    tokens = [completion.tokens for _, completion in sorted(done.items())]
    # Without top-k and top-p, no rank gets the logits of the whole vocabulary.
    engine = DynamicEngine(model, num_blocks=20, block_size=3)
    for seed, prompt in enumerate(PROMPTS):
        # Of a token of the second rank, too.
        bias = {40: 2.0, 77: 50.0 * (seed == 3)}
        params = SamplingParams(temperature=seed % 2, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=bias)
        engine.add(prompt, max_new_tokens=6, sampling_params=params, seed=seed, log_probs=seed == 1)
        params = SamplingParams(min_p=0.02, min_new_tokens=2, logit_bias={99: 50.0})
        scored = seed == 2
        engine.add(prompt, max_new_tokens=4, sampling_params=params, seed=seed, eos_id=99, prompt_log_probs=scored)
    more = engine.run()
    assert len(more[5].prompt_log_probs or []) == len(PROMPTS[2]) - 1
    assert all(more[number].tokens.index(99) == 2 for number in (1, 3, 5, 7)), "they end after their least tokens"
    assert more[6].tokens == [77] * 6
    tokens += [completion.tokens for completion in more.values()]
    values = [*(more[2].log_probs or []), *(more[5].prompt_log_probs or [])]
    # All settings, and log-probabilities of all kinds, beside each other, in parts of prompts.
    engine = DynamicEngine(model, num_blocks=30, block_size=3, step_tokens=6)
    for number, settings in enumerate(SETTINGS):
        engine.add(
            PROMPTS[number % 4],
            max_new_tokens=6,
            sampling_params=SamplingParams(**settings),
            seed=30 + number,
            eos_id=EOS,
            log_probs=True,
            top_log_probs=number % 4,
            processed_log_probs=number % 2 == 1,
            prompt_log_probs=number % 3 == 2,
        )
    found = engine.run()
    # Each kind by itself: what needs the whole vocabulary on a rank, no other request may ask for.
    for kind in ({"top_log_probs": 3}, {"processed_log_probs": True}):
        params = SamplingParams(temperature=1.5)
        engine.add(PROMPTS[2], max_new_tokens=4, sampling_params=params, seed=7, n=2, log_probs=True, **kind)
        found |= engine.run()
    for _, each in sorted(found.items()):
        tokens += [each.tokens, *map(list, each.top_log_probs or [])]
        values += [*(each.log_probs or []), *(each.prompt_log_probs or [])]
        # Not of tokens that are not sampled.
        values += [max(value, -1e3) for most in each.top_log_probs or [] for value in most.values()]
    logs = torch.cat([logs.flatten(), torch.tensor(values, dtype=torch.float64)])
    return tokens, logs.numpy(), [(step.tokens, step.preempted, step.shared) for step in steps]


def _complete(name: str, options: dict[str, Any]) -> Any:
    _, _, model = divided(name, options)
    engine = DynamicEngine(model, num_blocks=20)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=6)
    return ask(model), engine.run()


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    # of "early", the second stage has attention alone, and needs no states
    [
        LAYOUTS[0],
        *(pytest.param(*LAYOUTS[i], marks=pytest.mark.full) for i in (1, 3)),
        LAYOUTS[4],
        LAYOUTS[6],
        ("latent", 2, SP),
        ("hybrid", 2, SP),
        ("early", 2, PP),
    ],
    ids=str,
)
def test_every_rank_gets_the_completions_of_one_device(name: str, ranks: int, options: dict[str, Any]) -> None:
    tokens, logs, steps = ask(one_device(name))
    assert any(preempted for _, preempted, _ in steps)
    assert any(shared for *_, shared in steps)
    greedy = [generate(one_device(name), [prompt], max_new_tokens=9, temperature=0)[0] for prompt in PROMPTS]
    assert tokens[:8:2] == greedy
    results = run(_complete, ranks, name, options)
    for (found, found_logs, found_steps), unseeded in results:
        assert found == tokens
        if "pipeline_parallel" in options:
            # Each stage has a part of the texts, so that all of them compute at once.
            at_once = [len(new) for new, *_ in found_steps]
            assert sum(at_once) == sum(map(len, tokens[:8]))
            assert max(at_once) <= 5, "a pass with almost all texts"
        else:
            assert found_steps == steps
        assert abs(found_logs - logs).max() < 1e-9
        assert unseeded == results[0][1], "ranks draw differently"


REQUESTS = [([[5, 6, 7], [8]], 3), ([[9, 10, 11, 12, 13]], 9)]


def _each(degrees: dict[str, int], error: bool) -> tuple[int, list[list[int]], int]:
    root = build().double().to("meta")
    split = megalight.parallelize(root, megalight.Layout(**degrees), seed=3, fill=True)
    replica, engine = split.mesh.rank("dp"), DynamicEngine(ParallelGPT(split), num_blocks=8, block_size=3)
    prompts, count = REQUESTS[replica]
    stop = raising(2) if error and replica == 0 else None
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=count, sampling_params=SamplingParams(temperature=0), stop=stop)
    done: dict[int, Completion] = {}
    steps = 0
    while True:
        try:
            if (step := engine.step()) is None:
                break
            done |= step.finished
        except ZeroDivisionError:
            assert error
        steps += 1
    return replica, [completion.tokens for _, completion in sorted(done.items())], steps


def _poisoned(options: dict[str, int], bad: int) -> Any:
    split = megalight.parallelize(build().double().to("meta"), megalight.Layout(**options), seed=3, fill=True)
    with torch.no_grad():
        for chunk in split.chunks:
            if chunk.embed is not None:
                chunk.embed.word.weight[bad] = torch.nan  # type: ignore[union-attr, operator]
    engine = DynamicEngine(ParallelGPT(split), num_blocks=20, block_size=3, step_tokens=6)
    for prompt in ([5, 6, 7], [5, 6, 7, bad, 8], [8], [bad]):
        engine.add(prompt, max_new_tokens=6, sampling_params=SamplingParams(temperature=0))
    return engine.run()


@pytest.mark.parametrize("options", [{"pipeline_parallel": 2}, {"expert_parallel": 2}], ids=str)
def test_a_request_whose_logits_are_nan_fails_alone_on_all_ranks(options: dict[str, int]) -> None:
    whole = build().double()
    initialize(whole, 3, "model.")
    prompts = [[5, 6, 7], [8]]
    first, second = (generate(whole, [prompt], max_new_tokens=6, temperature=0)[0] for prompt in prompts)
    bad = next(token for token in range(9, 30) if token not in [*first, *second])
    failed = Completion([], None, "error")
    expected = {0: Completion(first, None, "length"), 1: failed, 2: Completion(second, None, "length"), 3: failed}
    assert run(_poisoned, 2, options, bad) == [expected] * 2


@pytest.mark.parametrize("error", [False, True])
def test_replicas_that_share_experts_step_together(error: bool) -> None:
    whole = build().double()
    initialize(whole, 3, "model.")
    for replica, found, steps in run(_each, 2, {"expert_parallel": 2}, error):
        prompts, count = REQUESTS[replica]
        assert found == [generate(whole, [prompt], max_new_tokens=count, temperature=0)[0] for prompt in prompts]
        assert steps == 10, "9, and one in which they find that all have ended"


def arrivals(engine: DynamicEngine, seed: int = 3) -> dict[int, tuple[list[int], int, int]]:
    """Ask at random times, with cancels and suspends: number -> prompt, seed, length, of those that must complete."""
    chance = random.Random(seed)
    expected: dict[int, tuple[list[int], int, int]] = {}
    found: dict[int, Completion] = {}
    for turn in range(14):
        for _ in range(chance.choice([0, 1, 1, 2]) if turn < 10 else 0):
            prompt, count = chance.choice(PROMPTS), chance.randint(1, 9)
            number = engine.add(prompt, max_new_tokens=count, seed=turn, log_probs=turn % 2 == 0)
            expected[number] = prompt, turn, count
        number = engine.add([1, 2], max_new_tokens=20, stop=lambda new: len(new) == 2, seed=turn)
        expected[number] = [1, 2], turn, 2
        if turn % 4 == 1:
            engine.cancel(engine.add([3, 4], max_new_tokens=20))
            if number in engine.unfinished:
                engine.cancel(number)
                del expected[number]
        if turn in (4, 9):
            engine.suspend(keep_cache=turn == 9, weights=turn == 9)
            engine.resume()
        if (step := engine.step()) is not None:
            found |= step.finished
    found |= engine.run()
    assert {number: len(each.tokens) for number, each in found.items()} == {n: e[2] for n, e in expected.items()}
    return {number: (each.tokens, *expected[number]) for number, each in found.items()}  # type: ignore[misc]


class Together:
    """Stands for graphs whose recording needs all ranks of a replica; none is left."""

    def __init__(self, engine: DynamicEngine) -> None:
        self.engine = engine

    def create(self) -> None:
        assert isinstance(self.engine.model, ParallelGPT)
        assert self.engine.model.least(1) == 1
        self.engine._passes.graphs = None


def _asked(name: str, options: dict[str, Any]) -> Any:
    _, _, model = divided(name, options)
    engine = DynamicEngine(model, num_blocks=8, block_size=3, step_tokens=5, first_rank_only=True)
    engine._passes.graphs = Together(engine)  # type: ignore[assignment]
    if not model.first:
        with pytest.raises(ConfigurationError, match="the first rank of the replica makes all calls"):
            engine.add([1], max_new_tokens=1)
        engine.follow()
        return None
    with pytest.raises(ConfigurationError, match="this rank follows no other"):
        engine.follow()
    engine.create_cuda_graphs()
    found = arrivals(engine)
    engine.close()
    assert engine.blocks.free == 8
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [LAYOUTS[0], LAYOUTS[2], pytest.param(*LAYOUTS[3], marks=pytest.mark.full), LAYOUTS[6], ("early", 2, PP)],
    ids=str,
)
def test_one_rank_is_asked(name: str, ranks: int, options: dict[str, Any]) -> None:
    model = one_device(name)
    found, *others = run(_asked, ranks, name, options)
    assert others == [None] * (ranks - 1)
    assert len(found) > 15
    for tokens, prompt, seed, count in found.values():
        assert tokens == generate(model, [prompt], max_new_tokens=count, seed=seed)[0]


def _refused(name: str, options: dict[str, Any], folder: Path) -> Any:
    _, _, model = divided(name, options)
    own = folder / str(int(model.first))
    own.mkdir()
    with pytest.MonkeyPatch.context() as patch, fake_driver(own, patch) as driver:
        return _resume_twice(model, driver)


def _resume_twice(model: ParallelGPT, driver: FakeDriver) -> Any:
    engine = DynamicEngine(model, num_blocks=20, block_size=3, first_rank_only=True)
    if not model.first:
        resume, refusals = engine._resume, []

        def scarce() -> str | None:
            driver.limit = 0 if len(refusals) % 3 < 2 else 1 << 40
            refusals.append(resume())
            return refusals[-1]

        engine._resume = scarce  # type: ignore[method-assign]
        engine.follow()
        return refusals
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=6, sampling_params=SamplingParams(temperature=0))
    for _ in range(2):  # weights move, and then stay
        engine.step()
        engine.suspend(keep_cache=True, weights=True)
        for _ in range(2):
            with pytest.raises(MegalightError, match=r"still suspended, .*: another rank of the replica has"):
                engine.resume()
            assert driver.mapped == 0
        engine.resume()
    found = engine.run()
    engine.close()
    return [completion.tokens for completion in found.values()]


def test_a_rank_without_memory_keeps_all_suspended(tmp_path: Path) -> None:
    found, refusals = run(_refused, 2, "gqa", SP, tmp_path)
    assert found == generate(one_device("gqa"), PROMPTS, max_new_tokens=6, temperature=0)
    assert [each is None or "has less than" in each for each in refusals] == [True] * 6
    assert refusals[2::3] == [None, None]


def _asked_with_experts(ahead: bool) -> Any:
    split = megalight.parallelize(
        build().double().to("meta"),
        megalight.Layout(expert_parallel=2, tensor_parallel=2, sequence_parallel=True),
        seed=3,
        fill=True,
    )
    model = ParallelGPT(split)
    engine = DynamicEngine(model, num_blocks=8, block_size=3, step_tokens=5, first_rank_only=True)
    engine._passes.runs_ahead = ahead
    if not model.first:
        engine.follow()
        return None
    prompts, count = REQUESTS[split.mesh.rank("dp")]
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=count, sampling_params=SamplingParams(temperature=0), stop=raising(99))
    found = engine.run()
    engine.close()
    return split.mesh.rank("dp"), [completion.tokens for completion in found.values()]


@pytest.mark.parametrize("ahead", [False, True])
def test_one_rank_of_each_replica_is_asked_where_these_share_experts(ahead: bool) -> None:
    whole = build().double()
    initialize(whole, 3, "model.")
    results = [found for found in run(_asked_with_experts, 4, ahead) if found is not None]
    assert [replica for replica, _ in results] == [0, 1]
    for replica, found in results:
        prompts, count = REQUESTS[replica]
        assert found == [generate(whole, [prompt], max_new_tokens=count, temperature=0)[0] for prompt in prompts]
