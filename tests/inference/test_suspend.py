"""A suspended engine gives its memory back, and no text notices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError, MegalightError
from megalight.inference import Completion, DynamicEngine
from megalight.inference.cache import SlotEntries
from megalight.inference.engine_memory import _weights
from megalight.inference.fp8_weights import quantize_weights
from megalight.nn.init import initialize
from tests.inference.test_engine import MODELS, SAMPLED, alone
from tests.inference.test_generate import PROMPTS, build
from tests.inference.test_graphs import DIMENSIONS, recording
from tests.parallel.graphs.tape import Tape
from tests.support.fake_driver import PAGE, FakeDriver, fake_driver


def complete(engine: DynamicEngine, cycles: int, **how: Any) -> dict[int, Completion]:
    """Ask for all prompts again and again, and suspend after each step."""
    found: dict[int, Completion] = {}
    for cycle in range(cycles):
        if not engine.unfinished:
            for number, prompt in enumerate(PROMPTS):
                engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11 + number, log_probs=True)
        order, schedule = engine.unfinished, engine._scheduler
        step = engine.step()
        assert step is not None
        found |= step.finished
        options = how or [{}, {"keep_cache": True}, {"keep_cache": True, "weights": True}, {"weights": True}][cycle % 4]
        engine.suspend(**options)
        assert not engine._scheduler.cache.tensors
        if cycle % 3 == 0:
            engine.suspend(**options)
        if cycle % 5 == 0:
            engine.cancel(engine.add([1, 2], max_new_tokens=3))
        engine.resume()
        if cycle % 3 == 0:
            engine.resume()
        left = [number for number in order if number not in step.finished]
        assert engine.unfinished == left
        assert [request.number for request in (*schedule.running, *schedule.waiting)] == left, "they go on in order"
    return found | engine.run()


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        *[("llama", False), ("mamba", True), ("delta", False)],
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("llama", True), ("mamba", False), ("delta", True))),
    ],
)
def test_a_hundred_suspends_change_no_text(name: str, ahead: bool, poison: None) -> None:
    model = build(**MODELS[name])
    expected = alone(model, seed=11)
    engine = DynamicEngine(model, num_blocks=14, block_size=3, max_sequences=3, step_tokens=6)
    engine._passes.runs_ahead = ahead
    found = complete(engine, 100)
    for number, completion in zip(sorted(found), expected * (len(found) // 4), strict=True):
        assert found[number].tokens == completion
        assert len(found[number].log_probs or []) == 9
    assert engine.blocks.free == 14


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with fake_driver(tmp_path, monkeypatch) as found:
        yield found


@pytest.mark.parametrize("name", ["llama", "mamba", pytest.param("delta", marks=pytest.mark.full)])
def test_graphs_survive_where_addresses_stay(name: str, driver: FakeDriver) -> None:
    """What is mapped again holds NaN."""
    model, tape = build(**MODELS[name]), Tape()
    expected = alone(model, seed=11)
    engine = DynamicEngine(model, num_blocks=20, block_size=3, max_sequences=5, step_tokens=6)
    graphs = recording(engine, DIMENSIONS, tape)
    engine.create_cuda_graphs()
    recordings, pools = len(tape.tapes), engine._scheduler.cache.tensors
    addresses, size = [each.data_ptr() for each in pools], driver.mapped
    assert size >= sum(each.nbytes for each in pools)
    for turn in range(3):
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11 + number)
        found: dict[int, Completion] = {}
        for count, step in enumerate(engine):
            found |= step.finished
            if count % (2, 9, 9)[turn]:
                continue
            for _ in range(2):
                engine.suspend(keep_cache=turn == 0)
            assert driver.mapped == driver.handles == 0
            with pytest.raises(ConfigurationError, match=r"the engine is suspended and has no cache; call resume\(\)"):
                engine.create_cuda_graphs()
            for _ in range(2):
                engine.resume()
            assert driver.mapped == size
            states = [pool.stored for pool in engine._scheduler.cache._pools if isinstance(pool, SlotEntries)]
            assert turn == 0 or not any(bool(each.any()) for each in states if each is not None), "not zero"
        assert [each.tokens for _, each in sorted(found.items())] == expected
    assert [each.data_ptr() for each in engine._scheduler.cache.tensors] == addresses
    assert len(tape.tapes) == recordings == len(graphs._steps)
    assert engine.step_log.graphed > 20
    weight = next(model.parameters())  # a step of training may put it elsewhere
    engine.suspend()
    weight.data = weight.data.clone()
    engine.resume()
    assert not graphs._steps
    assert not tape.tapes
    del engine, graphs, pools, states, step, tape
    gc.collect()
    assert (driver.mapped, driver.reserved, driver.handles, driver.mistakes) == (0, 0, 0, 0)


def ask(engine: DynamicEngine) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11 + number)
    return [each.tokens for each in engine.run().values()]


@pytest.mark.parametrize("name", ["tied", "fp8", pytest.param("experts", marks=pytest.mark.full)])
def test_graphs_survive_suspends_with_weights_but_the_first(name: str, driver: FakeDriver) -> None:
    """What is mapped again holds NaN."""
    model, tape = build(**{**MODELS, "tied": {"style": "gpt2"}, "fp8": {"vocab_size": 61}}[name]), Tape()
    if name == "fp8":
        quantize_weights(model)
    expected = alone(model, seed=11)

    def engine_of() -> DynamicEngine:
        return DynamicEngine(model, num_blocks=20, block_size=3, max_sequences=5, step_tokens=6)

    engine = engine_of()
    recording(engine, DIMENSIONS, tape)
    engine.create_cuda_graphs()
    cache = driver.mapped
    engine.suspend(weights=True)
    assert not tape.tapes
    engine.resume()
    weights = [*{each.untyped_storage().data_ptr(): each for each in _weights(model)}.values()]
    large = sum(each.nbytes for each in weights if each.nbytes > PAGE // 2)
    whole, addresses = driver.mapped, [each.data_ptr() for each in weights]
    assert large <= whole - cache <= large + PAGE * len(weights)
    engine.create_cuda_graphs()
    made = tape.made
    for turn in range(3):
        assert ask(engine) == expected
        engine.suspend(keep_cache=turn == 1)
        if turn:
            engine.resume()
        for _ in range(2):
            engine.suspend(keep_cache=turn == 1, weights=True)
        assert driver.mapped == driver.handles == 0
        engine.resume()
        assert driver.mapped == whole
    assert ask(engine) == expected
    assert [each.data_ptr() for each in weights] == addresses
    assert tape.made == made == 2 * len(tape.tapes)
    if name == "tied":
        assert model.embed.word.weight.data_ptr() == model.head.output_layer.weight.data_ptr()
    # Another engine finds them there, and one that is gone does no harm.
    other = engine_of()
    other.suspend(weights=True)
    assert driver.mapped == cache
    other.resume()
    assert ask(other) == ask(engine) == expected
    assert tape.made == made
    del engine, tape
    gc.collect()
    other.suspend(weights=True)
    assert driver.mapped == 0
    other.resume()
    assert ask(other) == expected
    del other, weights
    model.to("meta")
    gc.collect()
    assert (driver.mapped, driver.reserved, driver.handles, driver.mistakes) == (0, 0, 0, 0)


def test_parts_of_a_buffer_stay_there_and_new_weights_win(driver: FakeDriver) -> None:
    model, tape = build(), Tape()
    expected = alone(model, seed=11)
    parameters = [*model.parameters()]
    flat = torch.cat([each.detach().flatten() for each in parameters])
    for part, each in zip(flat.split([each.numel() for each in parameters]), parameters, strict=True):
        each.data = part.view_as(each)
    engine = DynamicEngine(model, num_blocks=20, block_size=3, max_sequences=5, step_tokens=6)
    recording(engine, DIMENSIONS, tape)
    for _ in range(2):
        engine.create_cuda_graphs()
        assert ask(engine) == expected
        engine.suspend(weights=True)
        assert not tape.tapes
        assert driver.mapped == flat.untyped_storage().nbytes() == 0
        engine.resume()
        assert {each.untyped_storage()._cdata for each in parameters} == {flat.untyped_storage()._cdata}
    other = build()
    initialize(other, 6)
    for _ in range(2):
        engine.suspend(weights=True)
        for each, new in zip(parameters, other.parameters(), strict=True):
            each.data = new.detach().clone()
        engine.resume()
        assert ask(engine) == alone(other, seed=11) != expected


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_resume_without_memory_may_be_tried_again(keep_cache: bool, driver: FakeDriver) -> None:
    model = build(**MODELS["mamba"])
    expected = alone(model, seed=11)
    engine = DynamicEngine(model, num_blocks=20, block_size=3)
    cache, room = driver.mapped, driver.number("limit", 1)[0]
    large = [each for each in model.parameters() if each.nbytes > PAGE // 2]
    assert len(large) > 3

    def refused(reason: str, first: bool) -> None:
        with pytest.raises(MegalightError, match=f"is still suspended, as its memory cannot be taken: {reason}"):
            engine.resume()
        assert engine.suspended
        assert driver.mapped == driver.handles == 0
        assert all((each.untyped_storage().nbytes() == 0) == first for each in large)

    for first in (True, False):  # weights move, and then stay
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=11 + number)
        engine.step()
        engine.suspend(keep_cache=keep_cache, weights=True)
        for limit in (0, cache - 1):
            driver.limit = limit
            refused(f"cpu has less than {cache} bytes free", first)
        for limit in (cache, cache + 3 * PAGE):
            driver.limit = limit
            refused("cpu has less than", first)
        driver.limit = room
        engine._every = lambda flag: False  # type: ignore[method-assign]
        refused("another rank of the replica has too little", first)
        del engine._every
        driver.fail("access")
        refused("the CUDA driver's cuMemSetAccess failed with code 999", first)
        driver.fail(None)
        engine.resume()
        assert [each.tokens for each in engine.run().values()] == expected
    # Weights that were not suspended are nobody's to give back.
    values = [each.clone() for each in model.parameters()]
    engine.suspend(keep_cache=keep_cache)
    whole = driver.mapped
    driver.limit = whole
    with pytest.raises(MegalightError, match="is still suspended"):
        engine.resume()
    assert driver.mapped == whole
    driver.limit = room
    engine.resume()
    assert all(map(torch.equal, model.parameters(), values))
    assert driver.mistakes == 0


def test_a_kept_cache_spares_the_passes() -> None:
    model = build()
    engine = DynamicEngine(model, num_blocks=14, block_size=3)
    engine.add(list(range(20)), max_new_tokens=5, seed=1)
    engine.step()
    engine.suspend(keep_cache=True)
    engine.resume()
    lengths = [*engine._scheduler.cache.lengths]
    assert max(lengths) == 20
    engine.suspend(keep_cache=True)
    engine.suspend()  # changed its mind
    assert engine.blocks.free == 14
    assert max(engine._scheduler.cache.lengths) == 0
    engine.resume()
    assert len(engine.run()[0].tokens) == 5


def test_released_weights_come_back_where_they_are_tied() -> None:
    model = build("gpt2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    engine = DynamicEngine(model, num_blocks=14)
    engine.suspend(weights=True)
    assert all(weight.untyped_storage().nbytes() == 0 for weight in model.parameters())
    engine.suspend(weights=True)
    engine.resume()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_without_managed_memory_it_says_so() -> None:
    with pytest.warns(UserWarning, match="runs without managed memory, as memory_level=0 says: managed memory for cpu"):
        engine = DynamicEngine(build(), num_blocks=4, memory_level=1)
    assert engine.memory_level == 0
    with pytest.raises(ConfigurationError, match="memory_level is 3; it must be from 0 to 2"):
        DynamicEngine(build(), num_blocks=4, memory_level=3)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1, 2])
def test_on_a_gpu_memory_comes_free_and_graphs_survive(level: int, tmp_path: Path) -> None:
    from megalight.parallel.host_memory import why_not

    device = torch.device("cuda")
    if level and (reason := why_not(device)) is not None:
        pytest.skip(reason)
    model = build().to(device, torch.bfloat16)
    plain = DynamicEngine(model, num_blocks=64)
    plain.create_cuda_graphs()
    for number, prompt in enumerate(PROMPTS):
        plain.add(prompt, max_new_tokens=20, seed=number)
    expected = {number: each.tokens for number, each in plain.run().items()}
    engine = DynamicEngine(model, num_blocks=64, memory_level=level)
    engine.create_cuda_graphs()
    for number, prompt in enumerate(PROMPTS):
        engine.add(prompt, max_new_tokens=20, seed=number)
    found: dict[int, Completion] = {}
    addresses = [each.data_ptr() for each in engine._scheduler.cache.tensors]
    for cycle in range(100):
        step = engine.step()
        if step is None:
            break
        found |= step.finished
        engine.suspend(keep_cache=True, weights=cycle % 4 == 0)
        engine.resume()
    assert {number: each.tokens for number, each in found.items()} == expected
    assert [each.data_ptr() for each in engine._scheduler.cache.tensors] == addresses


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_on_a_gpu_discarded_pages_are_written_again(level: int) -> None:
    from megalight.parallel.host_memory import why_not

    device = torch.device("cuda")
    if (reason := why_not(device)) is not None:
        pytest.skip(reason)
    engine = DynamicEngine(build().to(device, torch.bfloat16), num_blocks=64, memory_level=level)
    engine.create_cuda_graphs()

    def texts() -> list[list[int]]:
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_new_tokens=12, seed=number)
        return [each.tokens for each in engine.run().values()]

    expected = texts()
    for _ in range(3):
        engine.suspend(weights=True)
        engine.resume()
        assert texts() == expected
