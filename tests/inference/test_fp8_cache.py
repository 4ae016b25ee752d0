"""Keys and values of 8 bits: half the memory, nearly the same model, and the same text however others run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.inference import DynamicEngine
from megalight.models.gpt import GPT, AttentionConfig, GPTConfig
from megalight.nn.init import initialize
from tests.inference.test_engine import GREEDY, PROMPTS, SAMPLED, tokens_of
from tests.inference.test_generate import build
from tests.inference.test_graphs import DIMENSIONS, recording


def stored_bytes(engine: DynamicEngine) -> int:
    return sum(pool.nbytes for pool in engine._scheduler.cache.tensors)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", marks=pytest.mark.full),
        pytest.param("windowed", marks=pytest.mark.full),
        pytest.param("sinks", marks=pytest.mark.full),
        "hybrid",
    ],
)
def test_texts_do_not_depend_on_how_prompts_are_divided_or_who_else_runs(name: str, poison: None) -> None:
    model = build(name)

    def texts(one_by_one: bool, recorded: bool = False, **options: Any) -> list[list[int]]:
        engine = DynamicEngine(model, block_size=3, kv_cache_dtype="fp8", **options)
        if recorded:
            recording(engine, DIMENSIONS)
        found: dict[int, Any] = {}
        for number, prompt in enumerate([*PROMPTS, [*PROMPTS[-1], 3]]):
            engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED, seed=number)
            if one_by_one:
                found |= engine.run()
        if not one_by_one:
            step = engine.step()
            engine.suspend(keep_cache=True)
            engine.resume()
            found = {} if step is None else dict(step.finished)
        found |= engine.run()
        return tokens_of(dict(sorted(found.items())))

    expected = texts(True, num_blocks=60, step_tokens=512)
    assert texts(False, num_blocks=8, step_tokens=5, max_sequences=3) == expected
    assert texts(False, recorded=True, num_blocks=20, step_tokens=6, max_sequences=5) == expected


def test_it_is_close_to_full_precision() -> None:
    model = build("windowed")
    found = []
    for dtype in ("auto", "fp8"):
        engine = DynamicEngine(model, num_blocks=40, block_size=3, kv_cache_dtype=dtype)
        engine.add(PROMPTS[-1], max_new_tokens=1, sampling_params=GREEDY, log_probs=True, prompt_log_probs=True)
        found.append(torch.tensor(engine.run()[0].prompt_log_probs))
    difference = (found[0] - found[1]).abs().max()
    assert 0 < difference < 0.1


def test_memory_halves() -> None:
    config = GPTConfig(
        num_layers=2, hidden_size=256, num_heads=2, vocab_size=61, max_sequence_length=64,
        attention=AttentionConfig(window=9, window_pattern=(True, False)),
    )  # fmt: skip
    model = GPT(config)
    initialize(model, 3)
    model = model.bfloat16().eval()
    whole, half = (DynamicEngine(model, num_blocks=9, kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    # a scale of 4 bytes for 128 features
    assert stored_bytes(half) / stored_bytes(whole) == (128 + 4) / 256
    assert {pool.dtype for pool in half._scheduler.cache.tensors} == {torch.float8_e4m3fn, torch.float32}


def test_what_it_does_not_serve_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_cache_dtype is 'int8'"):
        DynamicEngine(build(), num_blocks=4, kv_cache_dtype="int8")
    with pytest.raises(ConfigurationError, match="latent attention stores latents"):
        DynamicEngine(build("latent"), num_blocks=4, kv_cache_dtype="fp8")
