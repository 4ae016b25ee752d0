"""Batch-invariant mode: log-probabilities of the engine are bitwise those of a training forward, whoever else runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.inference import Completion, DynamicEngine, SamplingParams
from megalight.inference.speculator import DraftSpeculator, EagleSpeculator, NGramSpeculator
from megalight.models.gpt import GPT, GPTConfig, InitConfig
from megalight.nn import DistillationTarget
from megalight.nn.init import initialize
from megalight.nn.moe import MoEConfig
from megalight.nn.moe.config import CapacityConfig, RouterConfig
from megalight.ops.batch_invariant import MODE, batch_invariant_mode
from megalight.ops.divergence import Projection
from megalight.parallel.recompute import run_region
from megalight.types import PackedSequences
from tests.inference.test_engine import GREEDY, MODELS, tokens_of
from tests.inference.test_generate import PROMPTS, build
from tests.inference.test_generate_parallel import PP, SP, divided, one_device
from tests.inference.test_speculator import draft_of
from tests.support.workers import run

ROUTED = RouterConfig(top_k=2, score="sigmoid", dtype="float32")
SHARED: dict[str, Any] = {"moe": MoEConfig(num_experts=6, ffn_hidden_size=10, router=ROUTED)}
TEACHER = Projection(torch.zeros(2, 24).double(), torch.zeros(61, 24).double(), None, None)
LONG = [*range(9, 26), 9, 10]


def complete(
    model: GPT, prompts: Sequence[Sequence[int]], new: int, first: int = 0, **options: Any
) -> list[Completion]:
    """Seeds count from the first prompt's; every second text is scored, and shares no prefix."""
    engine = DynamicEngine(model, **{"num_blocks": 200, "batch_invariant": True} | options)
    for number, prompt in enumerate(prompts, first):
        params = SamplingParams(temperature=0.7, top_k=20) if number % 3 else GREEDY
        scored = number % 2 == 0
        engine.add(
            prompt,
            max_new_tokens=new,
            seed=number,
            sampling_params=params,
            log_probs=True,
            prompt_log_probs=scored,
        )
    return [*engine.run().values()]


def trained(model: GPT, prompts: Sequence[Sequence[int]], found: Sequence[Completion]) -> list[list[float]]:
    """The log-probabilities of all tokens but the first of each text, by one training forward of all texts."""
    rows = [[*prompt, *each.tokens] for prompt, each in zip(prompts, found, strict=True)]
    sequences = PackedSequences.of_lengths([len(row) - 1 for row in rows])
    tokens, labels = (
        torch.tensor([id for row in rows for id in part(row)]) for part in (lambda r: r[:-1], lambda r: r[1:])
    )
    with batch_invariant_mode():
        losses = model.train()(tokens, sequences, labels).losses
    losses.sum().backward()
    model.eval()
    return [part.neg().tolist() for part in losses.detach().double().split([*sequences.lengths])]


def check(
    model: GPT, prompts: Sequence[Sequence[int]], together: Sequence[Completion], each: Sequence[Completion]
) -> None:
    assert tokens_of(dict(enumerate(together))) == tokens_of(dict(enumerate(each)))
    for prompt, one, other, expected in zip(prompts, together, each, trained(model, prompts, each), strict=True):
        assert one.log_probs == other.log_probs == expected[len(prompt) - 1 :]
        assert one.prompt_log_probs in (None, expected[: len(prompt) - 1])
        assert one.prompt_log_probs == other.prompt_log_probs


QUICK = [("llama", torch.bfloat16), ("latent", torch.float32), ("shared", torch.bfloat16), ("sinks", torch.bfloat16)]
NAMES = ("llama", "gpt2", "latent", "experts", "shared", "sinks", "tempered", "capped", "windowed")
FULL = [(name, dtype) for name in NAMES for dtype in (torch.bfloat16, torch.float32) if (name, dtype) not in QUICK]


@pytest.mark.parametrize(("name", "dtype"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)])
def test_log_probabilities_are_those_of_training_alone_and_among_others(
    name: str, dtype: torch.dtype, poison: None
) -> None:
    model = build(**(MODELS | {"shared": SHARED})[name]).to(dtype)
    prompts = [*PROMPTS, LONG, LONG, LONG[:9]]
    each = [complete(model, [prompt], 5, number)[0] for number, prompt in enumerate(prompts)]
    # Prompts run in parts, share prefixes, and are preempted.
    together = complete(model, prompts, 5, num_blocks=14, block_size=3, step_tokens=7, max_sequences=5)
    check(model, prompts, together, each)


def test_without_the_mode_they_differ() -> None:
    """Otherwise the other tests show nothing: in bfloat16 a longer prompt is summed in another way."""
    model = build().bfloat16()
    prompts = [LONG, *PROMPTS]
    each = [complete(model, [prompt], 8, number, batch_invariant=False)[0] for number, prompt in enumerate(prompts)]
    together = complete(model, prompts, 8, step_tokens=7, batch_invariant=False)
    assert [one.log_probs for one in each] != [one.log_probs for one in together]


@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "latent", "experts"])
def test_ten_thousand_tokens_alone_and_among_64(name: str) -> None:
    model = GPT(
        GPTConfig(
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            vocab_size=128,
            max_sequence_length=256,
            init=InitConfig(std=0.3),
            **{key: value for key, value in MODELS[name].items() if key in ("moe", "latent", "mixer_pattern")},
        )
    ).bfloat16()
    initialize(model, 1)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(128, (1 + number % 40,), generator=generator).tolist() for number in range(64)]
    each = [complete(model, [prompt], 160, number)[0] for number, prompt in enumerate(prompts)]
    together = complete(model, prompts, 160, num_blocks=1000, max_sequences=64)
    assert sum(len(one.tokens) for one in together) == 10240
    check(model, prompts, together, each)


def test_greedy_texts_with_any_draft_are_those_of_the_base(poison: None) -> None:
    model = build().bfloat16()
    draft = draft_of(model).bfloat16()

    def found(speculator: Any) -> list[tuple[list[int], list[float] | None]]:
        engine = DynamicEngine(model, num_blocks=60, block_size=3, speculator=speculator, batch_invariant=True)
        engine._passes.runs_ahead = speculator is not None
        for prompt in [*PROMPTS, LONG]:
            engine.add(prompt, max_new_tokens=12, sampling_params=GREEDY, log_probs=True)
        return [(one.tokens, one.log_probs) for one in engine.run().values()]

    expected = found(None)
    assert found(NGramSpeculator(3, shortest=1)) == expected
    assert found(DraftSpeculator(model, model, 3)) == expected
    assert found(EagleSpeculator(draft, model, 3)) == expected


def test_gradients_are_the_ordinary_ones() -> None:
    def gradients(name: str, on: bool) -> dict[str, Tensor]:
        model = build(**(MODELS | {"shared": SHARED})[name]).train()
        sequences = PackedSequences.of_lengths([7, 12])
        tokens = torch.arange(20)
        with batch_invariant_mode(on):
            losses = model(tokens[:-1], sequences, tokens[1:]).losses
        losses.sum().backward()
        return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}

    for name in ("llama", "latent", "shared", "sinks", "capped"):
        expected, found = gradients(name, False), gradients(name, True)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert (found[key] - value).norm() <= 1e-10 * value.norm() + 1e-12, (name, key)


def test_recomputed_regions_are_in_the_mode_of_their_first_run() -> None:
    seen: list[bool] = []

    def region(x: Tensor) -> Tensor:
        seen.append(MODE.on)
        return x.square()

    x = torch.ones(3, requires_grad=True)
    with batch_invariant_mode():
        y = run_region(region, False, (x,), {})
    y.sum().backward()
    assert seen == [True, True]
    assert not MODE.on
    other: list[bool] = []
    with batch_invariant_mode():
        thread = threading.Thread(target=lambda: other.append(MODE.on))
        thread.start()
        thread.join()
    assert other == [False]


@pytest.mark.parametrize(
    ("name", "message"), [("mamba", "Mamba2"), ("hybrid", "ShortConv"), ("delta", "GatedDeltaNet")]
)
def test_recurrent_layers_are_refused(name: str, message: str) -> None:
    model = build(**MODELS[name])
    with pytest.raises(ConfigurationError, match=f"cannot hold: {message} has no"):
        DynamicEngine(model, num_blocks=9, batch_invariant=True)
    with pytest.raises(ConfigurationError, match="batch-invariant mode has no form of"), batch_invariant_mode():
        model(torch.tensor([1, 2]), PackedSequences.of_lengths([2]))


def test_what_follows_from_the_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_cache_dtype is 'fp8'"):
        DynamicEngine(build(), num_blocks=9, batch_invariant=True, kv_cache_dtype="fp8")
    with pytest.raises(ConfigurationError, match="attention_backend is 'reference'"):
        DynamicEngine(build(), num_blocks=9, batch_invariant=True, attention_backend="reference")
    with pytest.raises(ConfigurationError, match="divergences from a teacher"), batch_invariant_mode():
        build().head.learn(torch.zeros(2, 24).double(), torch.tensor([1, 2]), DistillationTarget(TEACHER))
    dropped = build(moe=MoEConfig(num_experts=4, ffn_hidden_size=10, capacity=CapacityConfig(factor=1.0)))
    with pytest.raises(ConfigurationError, match="routers that balance"), batch_invariant_mode():
        dropped(torch.tensor([1, 2]), PackedSequences.of_lengths([2]))


def completed(options: dict[str, Any]) -> list[tuple[list[int], list[float] | None]] | str:
    """Texts of a divided model, or why there are none."""
    _, _, model = divided("gqa", options)
    try:
        engine = DynamicEngine(model, num_blocks=60, block_size=3, batch_invariant=True, step_tokens=7)
    except ConfigurationError as error:
        return str(error)
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=5, sampling_params=GREEDY, log_probs=True)
    return [(each.tokens, each.log_probs) for each in engine.run().values()]


def test_stages_compute_the_same_bits_and_divided_layers_are_refused() -> None:
    found, other = run(completed, 2, PP)
    assert found == other
    model = one_device("gqa")
    each = [Completion(tokens, log_probs, "length") for tokens, log_probs in found]
    for prompt, (_, log_probs), expected in zip(PROMPTS, found, trained(model, PROMPTS, each), strict=True):
        assert log_probs == expected[len(prompt) - 1 :]
    assert all("tensor-, context- or expert-parallel" in each for each in run(completed, 2, SP))
