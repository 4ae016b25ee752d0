"""A GPT with latent attention, also with the experts of DeepSeek-V3, trains under every layout as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megalight.models.gpt import LatentConfig, PositionConfig
from megalight.nn.moe import BalanceConfig, MoEConfig, RouterConfig, SharedConfig
from megalight.ops.rotary import RotaryScaling
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.recompute import RecomputeOptions
from tests.strategies.training import CONFIGS, assert_same_run, by_hand, fit
from tests.support.workers import run

LATENT = replace(
    CONFIGS["mha"],
    mixer_pattern=("latent_attention",),
    head_dim=0,
    latent=LatentConfig(kv_rank=10, q_rank=14, head_dim=6, rotary_dim=4, value_dim=7),
    position=PositionConfig(
        interleaved=True, scaling=RotaryScaling("yarn", 4.0, original_length=8, mscale=1.0, mscale_all_dim=1.0)
    ),
)
DIRECT = replace(LATENT, latent=LatentConfig(kv_rank=10, head_dim=6, rotary_dim=4, value_dim=7))
DEEPSEEK = replace(
    LATENT,
    num_layers=4,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=12,
        pattern=(False, True, True, True),
        # the run by hand does not move the bias; tests of experts do
        router=RouterConfig(
            top_k=2, score="sigmoid", num_groups=2, group_top_k=1, scale=2.5, expert_bias=True, expert_bias_rate=0.0
        ),
        shared=SharedConfig(ffn_hidden_size=8),
        balance=BalanceConfig(z_loss=0.01),
    ),
)
MODELS = [LATENT, DIRECT, DEEPSEEK]
SP = {"tensor_parallel": 2, "sequence_parallel": True}
PP = {"pipeline_parallel": 2, "micro_batch_size": 1}
LAYOUTS: list[Any] = [
    (LATENT, 2, {**SP, "recompute": RecomputeOptions(granularity="selective", modules=("core_attn", "*_norm"))}),
    (DIRECT, 2, {"tensor_parallel": 2}),
    (LATENT, 2, {**PP, "recompute": RecomputeOptions(granularity="full", num_layers=1)}),
    (LATENT, 2, {"context_parallel": 2}),
    (DEEPSEEK, 2, {"expert_parallel": 2}),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            (DIRECT, 2, SP),
            (DEEPSEEK, 4, {**SP, **PP, "expert_parallel": 2}),
            (LATENT, 2, {"tensor_parallel": 2}),
            (LATENT, 4, {"tensor_parallel": 4, "sequence_parallel": True}),
            (LATENT, 4, {**PP, **SP}),
            (LATENT, 4, {**SP, "context_parallel": 2}),
            *[
                (LATENT, 2, {"context_parallel": 2, "context": ContextOptions(kind=kind)})
                for kind in ("ring", "all_gather", "all_to_all")
            ],
        ]
    ],
]


@functools.cache
def expected(number: int) -> dict[str, Any]:
    return by_hand(MODELS[number], packed=True)


def _rank(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    return fit(config, packed=True, **options)


@pytest.mark.parametrize(("config", "ranks", "options"), LAYOUTS)
def test_layout_trains_the_same_model(config: Any, ranks: int, options: dict[str, Any]) -> None:
    assert_same_run(run(_rank, ranks, config, options)[0], expected(MODELS.index(config)))
