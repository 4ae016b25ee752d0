"""QK-clip against heads scaled one by one, in layouts that divide heads, tokens and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megalight
from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT, AttentionConfig, GPTConfig
from megalight.models.gpt.config import LatentConfig
from megalight.models.gpt.module import GPTModule
from megalight.nn import InnerAttention
from megalight.optim import Muon, qk_clip
from megalight.optim.qk_clip import largest_logits
from megalight.types import PackedSequences
from tests.optim.test_muon import CONFIG, MUON, STEPS, by_hand
from tests.strategies.training import BASE, assert_same_run, fit
from tests.support.workers import run

THRESHOLD = 2e-3  # in some steps some heads exceed it, in others all do
BIASED = replace(BASE, attention=AttentionConfig(qkv_bias=True))
LATENT = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=48,
    vocab_size=101,
    max_sequence_length=24,
    mixer_pattern=("latent_attention",),
    latent=LatentConfig(q_rank=12, kv_rank=10, head_dim=6, rotary_dim=4, value_dim=5),
)
CLIPPED = replace(CONFIG, muon=replace(MUON, qk_clip=THRESHOLD))
scaled: list[int] = []
"""How many heads each step of the loop by hand has scaled."""


def scores(q: Tensor, k: Tensor, sequences: PackedSequences, inner: InnerAttention) -> list[float]:
    """The largest score of each head, pair by pair."""
    largest, start = [-float("inf")] * q.shape[1], 0
    for length in sequences.lengths:
        for head in range(q.shape[1]):
            key = k[start : start + length, head // (q.shape[1] // k.shape[1])]
            product = q[start : start + length, head] @ key.T * (inner.scale or q.shape[-1] ** -0.5)
            for i in range(length):
                for j in range(i + 1 if inner.causal else length):
                    far = inner.window is not None and i - j > inner.window
                    if not far and (inner.chunk is None or i // inner.chunk == j // inner.chunk):
                        largest[head] = max(largest[head], float(product[i, j]))
        start += length
    return largest


def begin(model: GPT) -> Callable[[dict[str, Tensor]], None]:
    found: dict[int, list[float]] = {}
    layers: list[Any] = list(model.layers.values())
    for index, layer in enumerate(layers):

        def watch(inner: Any, inputs: Any, index: int = index) -> None:
            q, k, _, sequences = inputs[:4]
            found[index] = scores(q.detach(), k.detach(), sequences, inner)

        layer.attention.inner.register_forward_pre_hook(watch)

    def finish(weights: dict[str, Tensor]) -> None:
        count = 0
        for index, largest in found.items():
            attention, prefix = layers[index].attention, f"layers.{index}.attention."
            g = [min(1.0, THRESHOLD / each) if each > 0 else 1.0 for each in largest]
            count += sum(each < 1 for each in g)
            if f"{prefix}q_up.weight" in weights:
                d, r, v = attention.head_dim, attention.rotary_dim, attention.value_dim
                for head, factor in enumerate(g):
                    query = weights[f"{prefix}q_up.weight"][head * (d + r) : (head + 1) * (d + r)]
                    query[:d] *= factor**0.5
                    query[d:] *= factor
                    weights[f"{prefix}kv_up.weight"][head * (d + v) :][:d] *= factor**0.5
                continue
            size = attention.head_dim
            per_key = len(g) // (len(weights[f"{prefix}k.weight"]) // size)
            for kind in ("weight", "bias"):
                if f"{prefix}q.{kind}" not in weights:
                    continue
                for head, factor in enumerate(g):
                    group = head // per_key
                    least = min(g[group * per_key : (group + 1) * per_key])
                    weights[f"{prefix}q.{kind}"][head * size : (head + 1) * size] *= factor / least**0.5
                    if head % per_key == 0:
                        weights[f"{prefix}k.{kind}"][group * size : (group + 1) * size] *= least**0.5
        scaled.append(count)

    return finish


def _rank(config: GPTConfig, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return fit(config, STEPS, options, optimizer=CLIPPED, micro_batch_size=1, **strategy)


LAYOUTS: list[Any] = [
    (BIASED, 1, {}, "optim"),
    # ranks of one key head hold other query heads
    pytest.param((BASE, 4, {"tensor_parallel": 4}, "optim"), marks=pytest.mark.full),
    (BASE, 2, {"context_parallel": 2}, "optim"),
    (LATENT, 2, {"tensor_parallel": 2}, "optim"),
    *(
        pytest.param(each, marks=pytest.mark.full)
        for each in (
            (BIASED, 4, {"pipeline_parallel": 2}, "optim_grads"),
            (BASE, 2, {}, "optim_grads_params"),
            (LATENT, 4, {"context_parallel": 2}, "no_shard"),
        )
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each[1]}-{each[2]}-{each[3]}")
def test_every_layout_clips_as_one_device(layout: tuple[GPTConfig, int, dict[str, Any], str]) -> None:
    config, ranks, strategy, level = layout
    scaled.clear()
    expected = by_hand(config, begin=begin)
    if scaled:  # not from the cache
        assert any(0 < count < 8 for count in scaled), scaled
    assert_same_run(run(_rank, ranks, config, strategy, {"level": level}, timeout=240)[0], expected)


@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 2}, {"chunk": 3}, {"scale": 0.7}], ids=lambda each: str(each)
)
def test_logits_of_what_attention_sees(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_clip, "BLOCK_BYTES", 4 * 17 * 8 * 3)  # blocks of three rows
    sequences = PackedSequences.of_lengths([5, 1, 9, 2])
    q, k = torch.randn(17, 4, 6, dtype=torch.float64), torch.randn(17, 2, 6, dtype=torch.float64)
    inner = InnerAttention(**options)
    found = largest_logits(q, k, sequences, inner)
    torch.testing.assert_close(found, torch.tensor(scores(q, k, sequences, inner), dtype=torch.float64))


def test_padding_has_no_logits() -> None:
    padded = replace(PackedSequences.of_lengths([4, 3]), num_padding=3)
    q, k = torch.randn(7, 2, 4), torch.randn(7, 2, 4)
    q[4:] *= 100
    real = PackedSequences.of_lengths([4])
    found = largest_logits(q, k, padded, InnerAttention())
    torch.testing.assert_close(found, largest_logits(q[:4], k[:4], real, InnerAttention()))


def test_layers_that_cannot_be_clipped_are_refused() -> None:
    config = replace(BASE, attention=AttentionConfig(qk_norm=True))
    model = megalight.parallelize(GPT(config))
    optimizer, _ = CLIPPED.build(model.root.named_parameters())
    with pytest.raises(ConfigurationError, match=r"qk_clip cannot serve layers.0.attention: it normalizes queries"):
        megalight.Training(model, optimizer, GPTModule(config))


def test_a_plain_loop_is_refused() -> None:
    optimizer = Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "whole_matrices": True}], qk_clip=100.0)
    with pytest.raises(ConfigurationError, match="nobody watches attention logits"):
        optimizer.step()


def test_a_threshold_is_above_zero() -> None:
    with pytest.raises(ConfigurationError, match=r"qk_clip of Muon is 0\.0; it must be above 0"):
        replace(MUON, qk_clip=0.0)
