"""Texts that begin equally share blocks, and each completion stays that of its prompt alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.inference import DynamicEngine, EngineStep, generate
from megalight.inference.blocks import PrefixCache, StateSnapshots
from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from tests.inference.test_engine import GREEDY, MODELS, SAMPLED, raising
from tests.inference.test_generate import build

SHARING = [name for name in MODELS if name not in ("hybrid", "delta", "mamba")]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def drawn(model: GPT, prompt: list[int], new: int, seed: int) -> list[int]:
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    return generate(model, [prompt], max_new_tokens=new, seed=seed, **options)[0]


def collect(engine: DynamicEngine) -> tuple[list[list[int]], list[EngineStep]]:
    steps = list(engine)
    done = {number: completion for step in steps for number, completion in step.finished.items()}
    return [completion.tokens for _, completion in sorted(done.items())], steps


@pytest.mark.parametrize("name", SHARING)
def test_a_prompt_of_many_completions_runs_once(name: str, poison: None) -> None:
    model = build(**MODELS[name])
    engine = DynamicEngine(model, num_blocks=40, block_size=3)
    for seed in range(4):
        engine.add(PROMPT, max_new_tokens=9, sampling_params=SAMPLED, seed=seed)
    engine.add([*PROMPT[:7], 3], max_new_tokens=9, sampling_params=SAMPLED, seed=4)
    first = engine.step()
    assert first is not None
    # 10 tokens: three full blocks, and a fourth of each text's own
    assert first.shared == {1: 9, 2: 9, 3: 9, 4: 6}
    assert sorted(first.tokens) == [0, 1, 2, 3, 4], "no one waits"
    assert engine.blocks.free == 40 - (3 + 4 + 1)
    found, steps = collect(engine)
    assert found == [*[drawn(model, PROMPT, 9, seed) for seed in range(4)], drawn(model, [*PROMPT[:7], 3], 9, 4)]
    assert not any(step.shared for step in steps)
    assert engine.blocks.free == 40


@pytest.mark.parametrize("name", ["hybrid", "delta", "mamba"])
@pytest.mark.parametrize("step_tokens", [4, 512])
def test_texts_with_states_go_on_from_the_end_of_the_common_part(name: str, step_tokens: int, poison: None) -> None:
    model = build(**MODELS[name])
    engine = DynamicEngine(model, num_blocks=40, block_size=3, max_sequences=2, step_tokens=step_tokens)
    prompts = [PROMPT, PROMPT, PROMPT, [*PROMPT[:7], 3], [*PROMPT[:7], 4], [9, 9, 9]]
    for seed, prompt in enumerate(prompts):
        engine.add(prompt, max_new_tokens=3 + seed, sampling_params=SAMPLED, seed=seed)
    found, steps = collect(engine)
    assert found == [drawn(model, prompt, 3 + seed, seed) for seed, prompt in enumerate(prompts)]
    shared: dict[int, int] = {}
    for step in steps:
        shared |= step.shared
    # the fourth text begins otherwise than those before it: what it has in common with the next is kept first
    assert shared == {1: 9, 2: 9, 4: 6}
    first = next(step for step in steps if step.tokens or step.shared)
    assert first.shared == {1: 9}, "the first stops after 9 tokens, and goes on with the second"
    assert engine.blocks.free == 40


def test_a_state_is_kept_until_its_block_or_entry_is_needed(poison: None) -> None:
    model = build("hybrid")
    # one text at a time, and one state
    engine = DynamicEngine(model, num_blocks=6, block_size=3, max_sequences=1)

    def ask(*prompts: list[int]) -> list[int]:
        """How many tokens of each prompt were there."""
        numbers = [engine.add(prompt, max_new_tokens=1, sampling_params=GREEDY) for prompt in prompts]
        found, steps = collect(engine)
        assert found == [generate(model, [prompt], max_new_tokens=1, temperature=0)[0] for prompt in prompts]
        shared: dict[int, int] = {}
        for step in steps:
            shared |= step.shared
        return [shared.get(number, 0) for number in numbers]

    other = list(range(20, 38))
    assert ask(PROMPT, PROMPT) == [0, 9]
    assert ask(PROMPT) == [9], "it stays after its texts have ended"
    assert ask(other) == [0], "no one else begins like this"
    assert ask(other, other, other) == [0, 15, 15]
    engine = DynamicEngine(model, num_blocks=20, block_size=3, max_sequences=1)
    assert ask(PROMPT, PROMPT) == [0, 9]
    assert ask(PROMPT[::-1], PROMPT, PROMPT[::-1], PROMPT[::-1]) == [0, 9, 0, 9]
    assert ask(PROMPT) == [0], "the entry has another state"


def test_the_state_that_was_used_longest_ago_goes_first() -> None:
    snapshots = StateSnapshots([10, 11])
    assert {snapshots.keep(1), snapshots.keep(2)} == {10, 11}
    entry = snapshots.use(1)
    assert snapshots.keep(3) != entry
    assert [block in snapshots for block in (1, 2, 3)] == [True, False, True]
    snapshots.forget(1)
    assert 1 not in snapshots
    assert snapshots.keep(4) == entry
    snapshots.clear()
    assert 3 not in snapshots
    assert {snapshots.keep(5), snapshots.keep(6)} == {10, 11}


def test_a_prompt_that_runs_in_parts_is_shared_when_it_has_run(poison: None) -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=40, block_size=2, step_tokens=4)
    for seed in range(3):
        engine.add(PROMPT, max_new_tokens=3, sampling_params=SAMPLED, seed=seed)
    found, steps = collect(engine)
    # 4, 4, and with the last 2 the first 2 of the others, which have the other 8
    assert [step.shared for step in steps[:3]] == [{}, {}, {1: 8}]
    assert found == [drawn(model, PROMPT, 3, seed) for seed in range(3)]


def test_later_texts_find_what_those_before_left_until_it_is_needed(poison: None) -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=6, block_size=3)

    def ask(prompt: list[int], new: int = 1) -> int:
        """How many tokens of the prompt were there."""
        number = engine.add(prompt, max_new_tokens=new, sampling_params=GREEDY)
        found, steps = collect(engine)
        assert found == generate(model, [prompt], max_new_tokens=new, temperature=0)
        assert engine.blocks.free == 6
        return steps[0].shared.get(number, 0)

    assert ask(PROMPT, 4) == 0
    # the next turn of a chat: also what was completed lies there, but for the last token
    after = [*PROMPT, *generate(model, [PROMPT], max_new_tokens=4, temperature=0)[0]]
    assert ask(after) == 12
    assert ask([20, 21, 22, 23]) == 0, "another beginning"
    assert ask(after) == 12, "a block that nobody could find was given out first"
    assert ask([30] * 10) == 0  # takes 4 of 6 blocks: those that were used longest ago, the last of a text first
    assert ask(after[:7]) == 6, "the first blocks of a text are the last to go"
    assert ask(after) == 6
    assert ask(PROMPT[1:]) == 0


def test_equal_blocks_become_one() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=20, block_size=4)
    for _ in range(3):
        engine.add(PROMPT[:8], max_new_tokens=6, sampling_params=GREEDY)
    engine.step()
    assert engine.blocks.free == 20 - (1 + 3), "the last token of each runs, and its block with it"
    engine.step()
    assert engine.blocks.free == 20 - (2 + 3), "a second block for all, a third of each"
    assert [len({*blocks}) for blocks in zip(*engine.blocks.tables[:3], strict=True)] == [1, 1, 3]
    found, _ = collect(engine)
    assert found == generate(model, [PROMPT[:8]], max_new_tokens=6, temperature=0) * 3
    assert engine.blocks.free == 20


def test_new_weights_and_errors_leave_nothing_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=40, block_size=3)
    engine.add(PROMPT, max_new_tokens=2, sampling_params=GREEDY)
    engine.run()
    engine.suspend()
    initialize(model, 6)
    engine.resume()
    for _ in range(2):
        engine.add(PROMPT, max_new_tokens=2, sampling_params=GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers["1"], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    found, steps = collect(engine)
    assert [step.shared for step in steps] == [{2: 9}, {}]
    assert found == generate(model, [PROMPT], max_new_tokens=2, temperature=0) * 2


@pytest.mark.parametrize("name", ["hybrid", "delta", "mamba"])
def test_states_of_old_weights_are_not_found(name: str) -> None:
    model = build(**MODELS[name])
    engine = DynamicEngine(model, num_blocks=40, block_size=3)
    for seed in (6, 7):
        for number in range(3):
            engine.add(PROMPT, max_new_tokens=4, sampling_params=SAMPLED, seed=number)
        found, steps = collect(engine)
        assert any(step.shared for step in steps), "no state is kept"
        assert found == [drawn(model, PROMPT, 4, number) for number in range(3)]
        initialize(model, seed)
        engine.reset_cache()
        assert engine.blocks.find(PROMPT, states=True) == []
        assert not any(block in engine.blocks.prefixes.snapshots for block in range(40))


def test_texts_that_begin_otherwise_share_nothing() -> None:
    prefixes = PrefixCache(2)
    prefixes.put(None, [1, 2], 7)
    prefixes.put(7, [3, 4], 5)
    prefixes.put(None, [3, 4], 6)
    assert prefixes.find([1, 2, 3, 4, 5]) == [7, 5]
    assert prefixes.find([1, 2, 3]) == [7]
    assert prefixes.find([3, 4, 3, 4]) == [6], "the same tokens after others"
    assert prefixes.find([2, 1]) == prefixes.find([1]) == []
    prefixes.forget(5)
    prefixes.forget(9)
    assert prefixes.find([1, 2, 3, 4]) == [7]
    assert [block in prefixes for block in (5, 6, 7)] == [False, True, True]
    prefixes.clear()
    assert prefixes.find([1, 2]) == []
    assert 7 not in prefixes


def check(engine: DynamicEngine) -> None:
    """Each block is free or in tables, and what can be found is what the tables say."""
    blocks, schedule = engine.blocks, engine._scheduler
    slots = [request.slot for request in schedule.running]
    assert all(schedule.cache.lengths[slot] == 0 for slot in range(len(blocks.tables)) if slot not in slots)
    for each in blocks.pools:
        users = Counter(block for table in each.tables for block in table)
        assert [users[block] for block in range(each.count)] == each._users
        assert {*each._free} == {*range(each.count)} - {*users}
    for request in schedule.running:
        assert request.slot is not None
        table = blocks.tables[request.slot]
        known = [block in blocks.prefixes for block in table]
        assert known == sorted(known, reverse=True)
        assert blocks.prefixes.find(request.tokens)[: sum(known)] == table[: sum(known)]


@cache
def model(name: str) -> GPT:
    return build(name)


@cache
def expected(name: str, prompt: tuple[int, ...], new: int, seed: int) -> list[int]:
    return drawn(model(name), [*prompt], new, seed)


REQUEST = st.tuples(st.integers(0, 12), st.lists(st.integers(1, 2), max_size=4), st.integers(1, 8), st.integers(0, 1))
SIZES = st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 4), st.integers(1, 9))
ACTIONS = st.sampled_from(["step", "step", "step", "cancel", "suspend", "fail", "stop"])


@settings(max_examples=40)
@given(
    st.sampled_from(["llama", "hybrid", "windowed"]),
    SIZES,
    st.lists(REQUEST | ACTIONS, min_size=1, max_size=30),
    st.data(),
)
def test_whatever_happens_each_completion_is_that_of_its_prompt_alone(name, sizes, actions, data) -> None:
    """Requests: how many tokens of a common beginning, its own, new tokens, a seed."""
    block_size, spare, max_sequences, step_tokens = sizes
    engine = DynamicEngine(
        model(name),
        num_blocks=-(-23 // block_size) + spare,
        block_size=block_size,
        max_sequences=max_sequences,
        step_tokens=step_tokens,
    )
    asked: dict[int, list[int]] = {}
    ended: dict[int, list[int]] = {}
    grown: dict[int, list[int]] = {}

    def step(run: Callable[[], EngineStep | None] = engine.step) -> bool:
        if (found := run()) is None:
            return False
        for number, token in found.tokens.items():
            grown.setdefault(number, []).append(token)
        ended.update({number: completion.tokens for number, completion in found.finished.items()})
        check(engine)
        return True

    stop = None
    for action in actions:
        if isinstance(action, tuple):
            common, own, new, seed = action
            prompt = [*([1, 2] * 6)[:common], *own] or [1]
            number = engine.add(prompt, max_new_tokens=new, sampling_params=SAMPLED, seed=seed, stop=stop)
            asked[number], stop = expected(name, tuple(prompt), new, seed), None
        elif action == "stop":
            stop = raising(1)
        elif action == "cancel" and engine.unfinished:
            number = data.draw(st.sampled_from(engine.unfinished))
            engine.cancel(number)
            del asked[number]
            grown.pop(number, None)
        elif action == "suspend":
            engine.suspend()
            engine.resume()
        elif action == "fail" and engine.unfinished and engine._open is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model(name).layers["1"], "forward", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.step()
        elif action == "step":
            try:
                step()
            except ZeroDivisionError:
                assert engine._open is not None
        check(engine)
    for _ in range(1000):
        try:
            if not step():
                break
        except ZeroDivisionError:
            assert engine._open is not None
    assert ended == asked
    assert grown == asked
    assert engine.blocks.free == engine.blocks.count
    assert engine.unfinished == []
