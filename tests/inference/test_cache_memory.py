"""A cache of so many bytes: as many blocks as fit, the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megalight.errors import ConfigurationError
from megalight.inference import DynamicEngine
from megalight.inference import engine_memory as cache_memory
from tests.inference.test_engine import GREEDY, MODELS, alone, ask, tokens_of
from tests.inference.test_generate import build
from tests.inference.test_generate_parallel import divided, one_device
from tests.support.workers import run


def bytes_of(engine: DynamicEngine) -> int:
    return sum(pool.stored.nbytes for pool in engine._scheduler.cache._pools if pool.stored is not None)


@pytest.mark.parametrize("name", ["llama", "sinks", "mamba", "delta"])
def test_the_cache_takes_what_it_was_given_and_not_a_block_more(name: str) -> None:
    model = build(**MODELS[name])
    given = 60_000
    engine = DynamicEngine(model, cache_memory=given, block_size=4, max_sequences=3)
    pools = [pool for pool in engine._scheduler.cache._pools if pool.count > engine._scheduler.cache.dummy_slot + 1]
    block = sum(4 * pool.stored[0].nbytes for pool in pools if pool.stored is not None)
    # before the first pass
    assert given - block < bytes_of(engine) <= given or engine.blocks.count == 30, "30: all that three texts can use"
    addresses = [pool.stored.data_ptr() for pool in pools if pool.stored is not None]
    ask(engine)
    assert tokens_of(engine.run()) == alone(model)
    assert [pool.stored.data_ptr() for pool in pools if pool.stored is not None] == addresses


def test_a_share_is_of_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_memory, "_free", lambda device: 100_000)
    whole = DynamicEngine(build(), cache_memory=50_000, block_size=2)
    assert DynamicEngine(build(), cache_memory=0.5, block_size=2).blocks.count == whole.blocks.count
    assert whole.blocks.count > 10


@pytest.mark.parametrize("memory", [0, -1, 1.5, 0.0, True, "1G", float("nan")])
def test_other_values_are_refused(memory: Any) -> None:
    with pytest.raises(ConfigurationError, match="cache_memory is"):
        DynamicEngine(build(), cache_memory=memory)
    for both in ({}, {"num_blocks": 4, "cache_memory": 4}):
        with pytest.raises(ConfigurationError, match="either num_blocks or cache_memory"):
            DynamicEngine(build(), **both)
    with pytest.raises(ConfigurationError, match=r"cache_memory=100 is 100 bytes, and a block of 16 tokens"):
        DynamicEngine(build(), cache_memory=100)


def _blocks(name: str, options: dict[str, Any]) -> Any:
    _, _, model = divided(name, options)
    engine = DynamicEngine(model, cache_memory=20_000, block_size=3, max_sequences=2, step_tokens=4)
    engine.add([1, 2, 3], max_new_tokens=5, sampling_params=GREEDY)
    held = [each.count for each in engine.blocks.pools]
    return held, bytes_of(engine), engine.run()[0].tokens


@pytest.mark.parametrize(("name", "layout", "pools"), [("gqa", "Et|tttL", 1), ("windows", "Ett|ttL", 2)])
def test_stages_with_other_layers_have_equally_many_blocks(name: str, layout: str, pools: int) -> None:
    options = {"pipeline_parallel": 2, "pipeline_layout": layout}
    (first, first_bytes, tokens), (second, second_bytes, others) = run(_blocks, 2, name, options)
    assert first == second
    assert len(first) == pools
    assert first_bytes * (3 - pools) < second_bytes <= 20_000
    engine = DynamicEngine(one_device(name), num_blocks=9)
    engine.add([1, 2, 3], max_new_tokens=5, sampling_params=GREEDY)
    assert tokens == others == engine.run()[0].tokens
