"""Latent attention: equal to its formula head by head, and the same when it attends to latents in generation."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.inference import Cache
from megalight.models.gpt import GPTConfig, LatentConfig
from megalight.models.gpt.flops import flops_per_token
from megalight.nn import InnerAttention, LatentAttention, LayerContext, Rotary
from megalight.nn.adapter import Adapter
from megalight.nn.init import initialize
from megalight.ops.paged_append import dequantize_heads, quantize_heads
from megalight.ops.rotary import RotaryScaling
from megalight.types import PackedSequences

HEADS, KV, D, R, V = 3, 7, 5, 4, 6
LENGTHS = [5, 1, 9]
YARN = RotaryScaling("yarn", 4.0, original_length=16, mscale=0.7, mscale_all_dim=1.3)
SCALE = YARN.score_factor / math.sqrt(D + R)


def build(q_rank: int | None = 8) -> tuple[LatentAttention, Rotary]:
    inner = InnerAttention(scale=SCALE)
    mixer = LatentAttention(12, HEADS, q_rank, KV, D, R, V, inner, rotary="rotary", std=0.4, proj_std=0.4).double()
    initialize(mixer, 1)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer, Rotary(R, 100.0, scaling=YARN, interleaved=True)


def context_of(rotary: Rotary, sequences: PackedSequences) -> LayerContext:
    return LayerContext(sequences, {"rotary": rotary(sequences.positions, torch.float64)})


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """Rotate neighboring features, and multiply them by the concentration."""
    features = []
    for i, frequency in enumerate(YARN.frequencies(R, 100.0).tolist()):
        cos, sin = (YARN.concentration * f(position * frequency) for f in (math.cos, math.sin))
        features += [x[2 * i] * cos - x[2 * i + 1] * sin, x[2 * i] * sin + x[2 * i + 1] * cos]
    return torch.stack(features)


def by_loop(mixer: LatentAttention, hidden: Tensor) -> Tensor:
    """Token by token, head by head, sequence by sequence."""
    outputs, scale = [], SCALE
    for part in hidden.split(LENGTHS):
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        for t, x in enumerate(part):
            latent, shared = (mixer.kv_down.weight @ x).split([KV, R])
            up = (mixer.kv_up.weight @ normed(latent, mixer.kv_latent_norm.weight)).split(D + V)
            keys.append([torch.cat([head[:D], turned(shared, t)]) for head in up])
            values.append([head[D:] for head in up])
            q_latent = x
            if mixer.q_down is not None:
                q_latent = normed(mixer.q_down.weight @ x, mixer.q_latent_norm.weight)  # type: ignore[union-attr]
            mixed = []
            for h, q in enumerate((mixer.q_up.weight @ q_latent).split(D + R)):
                query = torch.cat([q[:D], turned(q[D:], t)])
                weights = torch.stack([query @ keys[j][h] * scale for j in range(t + 1)]).softmax(0)
                mixed.append(sum(weights[j] * values[j][h] for j in range(t + 1)))
            outputs.append(mixer.proj.weight @ torch.cat(mixed))  # type: ignore[arg-type]
    return torch.stack(outputs)


@pytest.mark.parametrize("q_rank", [8, None])
def test_equals_the_formula(q_rank: int | None) -> None:
    mixer, rotary = build(q_rank)
    hidden = torch.randn(sum(LENGTHS), 12, dtype=torch.float64, requires_grad=True)
    found = mixer(hidden, context_of(rotary, PackedSequences.of_lengths(LENGTHS)))
    expected, factor = by_loop(mixer, hidden), torch.randn_like(found)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    inputs = [hidden, *mixer.parameters()]
    gradients = [torch.autograd.grad((y * factor).sum(), inputs) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_is_continued_from_latents(adapted: bool, quantized: bool) -> None:
    """Several tokens at a time, slots in any order; a state has one row of ``c + R`` features per token.

    In 8 bits, the result is that of latents which are rounded at once.
    """
    mixer, rotary = build()
    if adapted:  # its weight is not all that the projection computes
        mixer.kv_up.adapter = Adapter.of(mixer.kv_up, "kv_up", ["kv_up"], width=2, scale=1.0, dropout=0.0)
        torch.nn.init.normal_(mixer.kv_up.adapter.A)
        torch.nn.init.normal_(mixer.kv_up.adapter.B)
    cache = Cache({"0": mixer}, 3, 20, quantized=quantized)

    def rounded(module: torch.nn.Module, given: Any, latent: torch.Tensor) -> torch.Tensor:
        return dequantize_heads(*quantize_heads(latent), latent.dtype)

    rows = {slot: torch.empty(0, 12, dtype=torch.float64) for slot in range(3)}
    for slots, counts in [([0, 1, 2], [2, 6, 1]), ([2, 0], [1, 1]), ([1, 0, 2], [3, 1, 2])]:
        sequences = cache.extend(slots, counts, "cpu")
        new = torch.randn(sum(counts), 12, dtype=torch.float64)
        found = mixer(new, context_of(rotary, sequences), cache.states["0"])
        hook = mixer.kv_latent_norm.register_forward_hook(rounded) if quantized else nullcontext()
        for slot, part in zip(slots, new.split(counts), strict=True):
            rows[slot] = torch.cat([rows[slot], part])
        with hook:
            wholes = [mixer(rows[s], context_of(rotary, PackedSequences.of_lengths([len(rows[s])]))) for s in slots]
        expected = torch.cat([out[-count:] for out, count in zip(wholes, counts, strict=True)])
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    # a block for each slot, and a dummy
    shapes = [(80, KV), (80, R), (80,)] if quantized else [(80, KV + R)]
    assert [tuple(pool.shape) for pool in cache.tensors] == shapes


SIZES = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "vocab_size": 9, "max_sequence_length": 9}
LATENT = {"kv_rank": 6, "head_dim": 4, "rotary_dim": 2, "value_dim": 5}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mixer_pattern": ["latent_attention"]}, "without its sizes; set latent.kv_rank"),
        ({"latent": LATENT}, "no entry of mixer_pattern is latent_attention"),
        ({"latent": LATENT, "mixer_pattern": ["latent_attention", "attention"]}, "whose rotary tables differ"),
        ({"latent": LATENT, "mixer_pattern": ["latent_attention"], "head_dim": 4}, "= 6 features"),
        ({"latent": LATENT, "mixer_pattern": ["latent_attention"], "num_kv_heads": 1}, "num_kv_heads 1"),
        ({"latent": {**LATENT, "rotary_dim": 3}, "mixer_pattern": ["latent_attention"]}, "it must be even"),
        ({"latent": {**LATENT, "kv_rank": 0}, "mixer_pattern": ["latent_attention"]}, "kv_rank is 0"),
        (
            {"latent": LATENT, "mixer_pattern": ["latent_attention"], "attention": {"qk_norm": True}},
            "have no meaning in latent attention",
        ),
    ],
)
def test_bad_configurations_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GPTConfig.from_dict({**SIZES, **values})


def test_operations_count_queries_and_values() -> None:
    latent = LatentConfig(**LATENT)  # type: ignore[arg-type]
    config = GPTConfig(**SIZES, latent=latent, mixer_pattern=("latent_attention",))  # type: ignore[arg-type]
    scores = flops_per_token(config, 8) - flops_per_token(config, 4)
    assert scores == 2 * 6 * 2 * (6 + 5) * (8 - 4) / 2  # layers, six, heads, features, keys
