"""Layers with windows or chunks give back the blocks that they no longer see, and no text notices."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megalight.errors import DataError
from megalight.inference import DynamicEngine, generate
from megalight.models.gpt import GPT, AttentionConfig
from megalight.types import AttentionSpan
from tests.inference.test_engine import GREEDY
from tests.inference.test_generate import build
from tests.inference.test_graphs import DIMENSIONS, recording

LONG = {"max_sequence_length": 96}
SPANS: dict[str, dict[str, Any]] = {
    "alternating": LONG | {"num_layers": 3, "attention": AttentionConfig(window=5, window_pattern=(True, True, False))},
    "chunks": LONG | {"attention": AttentionConfig(chunk=6, window_pattern=(True, False))},
    "all": LONG | {"attention": AttentionConfig(window=7)},
    "states": LONG | {"mixer_pattern": ("conv", "attention"), "conv_kernel": 4, "attention": AttentionConfig(window=5)},
}


def spanned(name: str) -> GPT:
    return build(**SPANS[name])


@pytest.mark.parametrize(
    ("name", "ahead"),
    # each kind of span, and each way of passes, once
    [
        pytest.param(name, ahead, marks=[pytest.mark.full] * ((name in ("alternating", "chunks")) != ahead))
        for name in SPANS
        for ahead in (False, True)
    ],
)
def test_texts_that_come_at_any_time_are_those_of_each_alone(name: str, ahead: bool, poison: None) -> None:
    """Some begin equally, some have windows behind them when others come, some are preempted, cancelled, suspended."""
    model, chance = spanned(name), random.Random(5)
    # without layers that see all, texts may be longer than all blocks
    blocks = 24 if name in ("alternating", "chunks") else 9
    engine = DynamicEngine(model, num_blocks=blocks, block_size=2, max_sequences=4, step_tokens=9)
    engine._passes.runs_ahead = ahead
    first = [chance.randrange(61) for _ in range(17)]
    expected: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    preempted = shared = 0
    for round_ in range(60):
        if round_ % 4 == 0:
            prompt = [*first[: chance.choice([0, 9, 17])], *(chance.randrange(61) for _ in range(chance.randint(1, 9)))]
            new = chance.randint(1, 20)
            number = engine.add(prompt, max_new_tokens=new, sampling_params=GREEDY)
            expected[number] = generate(model, [prompt], max_new_tokens=new, temperature=0)[0]
        if round_ == 33:
            gone = engine.add(first, max_new_tokens=9)
            engine.cancel(gone)
        if round_ in (21, 40):
            engine.suspend(keep_cache=round_ == 40)
            engine.resume()
        if (step := engine.step()) is not None:
            found |= {number: completion.tokens for number, completion in step.finished.items()}
            preempted, shared = preempted + len(step.preempted), shared + sum(step.shared.values())
    found |= {number: completion.tokens for number, completion in engine.run().items()}
    assert found == expected
    assert preempted, "the small pool forces nothing"
    assert shared or blocks == 9, "in the smallest pools others have what a text begins with"
    assert all(each.free == each.count for each in engine.blocks.pools)


@pytest.mark.parametrize("name", ["alternating", "all"])
def test_recorded_steps_read_the_tables_of_each_span(name: str, poison: None) -> None:
    model = spanned(name)
    engine = DynamicEngine(model, num_blocks=60, block_size=2, max_sequences=3, step_tokens=9)
    recording(engine, DIMENSIONS)
    prompts = [[7, 8, 9], [1] * 12, [3, 1, 4, 1, 5]]
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=20, sampling_params=GREEDY)
    found = engine.run()
    assert engine.step_log.graphed > 10
    expected = [generate(model, [prompt], max_new_tokens=20, temperature=0)[0] for prompt in prompts]
    assert [each.tokens for each in found.values()] == expected


def test_a_long_text_has_as_many_blocks_as_its_window_and_its_step() -> None:
    model = spanned("alternating")
    engine = DynamicEngine(model, num_blocks=48, block_size=2, max_sequences=2, step_tokens=8)
    (span,) = engine.blocks.spans.values()
    assert span.span == AttentionSpan(window=5)
    # two texts of 5 tokens in blocks of 2, each with two more, and the new ones of a step
    assert span.count == 2 * (3 + 2) + 4
    engine.add(list(range(40)), max_new_tokens=50, sampling_params=GREEDY)
    most = 0
    for _ in engine:
        most = max(most, span.count - span.free)
    assert most <= 3 + 1 + 4
    pools = [pool for pool in engine._scheduler.cache._pools if pool.stored is not None]
    assert sorted({(len(pool.stored) // 2, pool.span) for pool in pools}, key=str) == [(15, span.span), (49, None)]  # type: ignore[union-attr,arg-type]


def test_without_full_layers_a_text_may_be_longer_than_all_blocks(poison: None) -> None:
    model = spanned("all")
    # a window of 7 in blocks of 2, and two more
    engine = DynamicEngine(model, num_blocks=6, block_size=2, max_sequences=3, step_tokens=32)
    prompts = [list(range(40)), [5, 6, 7], list(range(30, 60))]
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=30, sampling_params=GREEDY)
    found = engine.run()
    expected = [generate(model, [prompt], max_new_tokens=30, temperature=0)[0] for prompt in prompts]
    assert [each.tokens for each in found.values()] == expected
    small = DynamicEngine(model, num_blocks=5, block_size=2)
    small.add([1] * 5, max_new_tokens=6)
    with pytest.raises(DataError, match="6 blocks of 2 tokens, and the cache has 5"):
        small.add([1] * 6, max_new_tokens=6)


def test_a_beginning_is_found_where_each_span_still_has_what_follows_it() -> None:
    model = spanned("alternating")
    engine = DynamicEngine(model, num_blocks=40, block_size=2, max_sequences=1, step_tokens=4)
    prompt = [chance % 61 for chance in range(3, 40, 2)]

    def ask(own: list[int]) -> int:
        engine.add(own, max_new_tokens=1, sampling_params=GREEDY)
        shared = 0
        for step in engine:
            shared += sum(step.shared.values())
            done = step.finished
        (completion,) = done.values()
        assert completion.tokens == generate(model, [own], max_new_tokens=1, temperature=0)[0]
        return shared

    assert ask(prompt) == 0
    # 19 tokens: 9 full blocks, of which the span still has the last ones
    assert ask(prompt) == 18
    assert ask(prompt[:12]) == 0, "the span has given the blocks before token 10 to later ones"
    # which have now lost theirs to this text
    assert ask(prompt) == 8


def test_memory_of_a_number_of_bytes_goes_to_layers_that_see_all() -> None:
    whole = DynamicEngine(build(**LONG, num_layers=3), cache_memory=80_000, block_size=2, max_sequences=2)
    part = DynamicEngine(spanned("alternating"), cache_memory=80_000, block_size=2, max_sequences=2, step_tokens=8)
    stored = [pool.stored for pool in part._scheduler.cache._pools if pool.stored is not None]
    assert sum(each.nbytes for each in stored) <= 80_000
    assert part.blocks.count > whole.blocks.count


@pytest.mark.parametrize("name", ["windowed", "sinks"])
def test_tokens_that_a_window_has_left_are_not_read(name: str) -> None:
    """NaN in all rows that a text does not have is never seen."""
    model = build(**LONG, style=name)
    engine = DynamicEngine(model, num_blocks=40, block_size=4, max_sequences=2)
    number = engine.add([1, 2, 3], max_new_tokens=30, sampling_params=GREEDY)
    expected = generate(model, [[1, 2, 3]], max_new_tokens=30, temperature=0)[0]
    found: list[int] = []
    for step in engine:
        found += step.tokens.values()
        for pool in engine._scheduler.cache._pools:
            blocks = pool.blocks.tables[0]  # type: ignore[union-attr]
            gone = [block for block in range(pool.blocks.count) if block not in blocks]  # type: ignore[union-attr]
            pool.stored_blocks[gone] = torch.nan  # type: ignore[union-attr]
    assert number == 0
    assert found == expected
