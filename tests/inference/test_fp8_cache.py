"""Keys and values of 8 bits: half the memory, nearly the same model, and the same text however others run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.inference import DynamicEngine
from megalight.models.gpt import GPT, AttentionConfig, GPTConfig, LatentConfig
from megalight.nn import LatentAttention, latent_attention
from megalight.nn.init import initialize
from megalight.ops.common import wide
from megalight.ops.paged_append import dequantize_heads, quantize_heads
from tests.inference import test_graphs_gpu
from tests.inference.test_engine import GREEDY, PROMPTS, SAMPLED, tokens_of
from tests.inference.test_generate import build, last_logits
from tests.inference.test_generate_parallel import PP, SP, divided, one_device
from tests.inference.test_graphs import DIMENSIONS, recording
from tests.support.workers import run


def stored_bytes(engine: DynamicEngine) -> int:
    return sum(pool.nbytes for pool in engine._scheduler.cache.tensors)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", marks=pytest.mark.full),
        pytest.param("windowed", marks=pytest.mark.full),
        pytest.param("sinks", marks=pytest.mark.full),
        "hybrid",
        "latent",
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


def round_latents(model: GPT) -> None:
    """Let latents go to 8 bits and back, in all passes."""

    def rounded(module: torch.nn.Module, given: Any, latent: torch.Tensor) -> torch.Tensor:
        return dequantize_heads(*quantize_heads(latent), wide(latent.dtype)).to(latent.dtype)

    for module in model.modules():
        if isinstance(module, LatentAttention):
            module.kv_latent_norm.register_forward_hook(rounded)


@pytest.mark.parametrize("expanded", [3, 128])
def test_texts_are_those_of_latents_that_are_rounded_at_once(expanded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference keeps nothing: it computes all tokens anew, from latents that went to 8 bits and back."""
    # From so many new tokens on, keys and values are computed of all stored latents.
    monkeypatch.setattr(latent_attention, "EXPANDED", expanded)
    model = build("latent")
    engine = DynamicEngine(model, num_blocks=20, block_size=3, step_tokens=6, kv_cache_dtype="fp8")
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=9, sampling_params=GREEDY)
    found = tokens_of(engine.run())

    plain = last_logits(model, [PROMPTS[2]])
    round_latents(model)
    assert not torch.allclose(last_logits(model, [PROMPTS[2]]), plain, rtol=1e-3), "rounding changes nothing"
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(9):
        for row, token in zip(rows, last_logits(model, rows).argmax(-1).tolist(), strict=True):
            row.append(token)
    assert found == [row[-9:] for row in rows]


@pytest.mark.gpu
def test_texts_of_graphs_are_those_of_latents_that_are_rounded_at_once() -> None:
    model = test_graphs_gpu.build("latent")
    found, uses = test_graphs_gpu.texts(model, 16, 16, create=True, kv_cache_dtype="fp8")
    assert sum(uses.values()) > 20
    round_latents(model)
    test_graphs_gpu.check_up_to_rounding(model, found)


def _texts(options: dict[str, Any]) -> list[list[int]]:
    _, _, model = divided("latent", options)
    return _rounded_texts(model)


def _rounded_texts(model: Any) -> list[list[int]]:
    engine = DynamicEngine(model, num_blocks=8, block_size=3, step_tokens=5, kv_cache_dtype="fp8")
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, max_new_tokens=9, sampling_params=SAMPLED if seed else GREEDY, seed=seed)
    return tokens_of(dict(sorted(engine.run().items())))


def test_latents_are_the_same_on_all_ranks() -> None:
    assert run(_texts, 4, PP | SP) == [_rounded_texts(one_device("latent"))] * 4


# Keys and values of all heads come from a latent of 10 features.
@pytest.mark.parametrize(("name", "bound"), [("windowed", 0.1), ("latent", 0.25)])
def test_it_is_close_to_full_precision(name: str, bound: float) -> None:
    model = build(name)
    found = []
    for dtype in ("auto", "fp8"):
        engine = DynamicEngine(model, num_blocks=40, block_size=3, kv_cache_dtype=dtype)
        engine.add(PROMPTS[-1], max_new_tokens=1, sampling_params=GREEDY, log_probs=True, prompt_log_probs=True)
        found.append(torch.tensor(engine.run()[0].prompt_log_probs))
    difference = (found[0] - found[1]).abs().max()
    assert 0 < difference < bound


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


def test_memory_of_latents() -> None:
    config = GPTConfig(
        num_layers=2, hidden_size=64, num_heads=2, vocab_size=61, max_sequence_length=64,
        mixer_pattern=("latent_attention",),
        latent=LatentConfig(kv_rank=512, q_rank=None, head_dim=8, rotary_dim=64, value_dim=8),
    )  # fmt: skip
    model = GPT(config)
    initialize(model, 3)
    model = model.bfloat16().eval()
    whole, half = (DynamicEngine(model, num_blocks=9, kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    # a scale of 4 bytes for each token, and rotated keys of 16 bits
    assert stored_bytes(half) / stored_bytes(whole) == (512 + 4 + 128) / 1152


def test_what_it_does_not_serve_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_cache_dtype is 'int8'"):
        DynamicEngine(build(), num_blocks=4, kv_cache_dtype="int8")
