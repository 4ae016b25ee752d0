"""Models like Gemma and Llama 4, with windows, chunks, and further norms, train under every layout as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megalight.models.gpt import AttentionConfig, NormConfig, PositionConfig, TemperatureConfig
from megalight.nn.moe import MoEConfig, RouterConfig, SharedConfig
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import PipelineOptions
from tests.strategies.training import CONFIGS, Gradients, assert_same_gradients, assert_same_run, by_hand, fit
from tests.support.workers import run

MODELS = {
    "gemma": replace(
        CONFIGS["gqa"],
        activation="geglu_tanh",
        tie_embeddings=True,
        embedding_multiplier=32**0.5,
        logit_softcap=5.0,
        norm=NormConfig(around_zero=True, after=True),
        position=PositionConfig(local_base=100.0),
        attention=AttentionConfig(qk_norm=True, softcap=2.0, window=3, window_pattern=(True, False)),
    ),
    "llama4": replace(
        CONFIGS["gqa"],
        position=PositionConfig(interleaved=True, pattern=(True, False)),
        attention=AttentionConfig(
            qk_l2_norm=True, chunk=4, window_pattern=(True, False), temperature=TemperatureConfig(length=3, scale=0.5)
        ),
        moe=MoEConfig(
            num_experts=4,
            ffn_hidden_size=12,
            weigh_input=True,
            router=RouterConfig(top_k=1, score="sigmoid"),
            shared=SharedConfig(ffn_hidden_size=8),
        ),
    ),
}
SP = {"tensor_parallel": 2, "sequence_parallel": True}
PP = {"pipeline_parallel": 2, "micro_batch_size": 1}
WHOLE = RecomputeOptions(granularity="full")
SOME = RecomputeOptions(granularity="selective", modules=("core_attn", "attention_norm", "mlp_norm"))
LAYOUTS: list[Any] = [
    ("gemma", 2, {**SP, "recompute": SOME}),
    ("gemma", 2, {"context_parallel": 2, "context": ContextOptions(kind="all_gather")}),
    ("llama4", 2, {"context_parallel": 2, "context": ContextOptions(kind="all_gather")}),
    ("llama4", 2, {**PP, "recompute": WHOLE}),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            ("gemma", 2, {"tensor_parallel": 2}),
            ("gemma", 2, {**PP, "pipeline": PipelineOptions(schedule="zero_bubble")}),
            ("gemma", 4, {**SP, "context_parallel": 2}),
            ("llama4", 2, {"context_parallel": 2}),
            ("llama4", 2, {**SP, "recompute": SOME}),
            ("llama4", 2, {"expert_parallel": 2}),
            ("llama4", 4, {**PP, **SP, "expert_parallel": 2}),
        ]
    ],
]


@functools.cache
def expected(name: str) -> dict[str, Any]:
    return by_hand(MODELS[name], packed=True)


def _rank(name: str, options: dict[str, Any]) -> dict[str, Any]:
    gradients = Gradients()
    return {**fit(MODELS[name], packed=True, extra_callbacks=[gradients], **options), "gradients": gradients.first}


@pytest.mark.parametrize(("name", "ranks", "options"), LAYOUTS)
def test_layout_trains_the_same_model(name: str, ranks: int, options: dict[str, Any]) -> None:
    found = run(_rank, ranks, name, options)[0]
    assert_same_gradients(found["gradients"], expected(name)["gradients"])
    assert_same_run(found, expected(name))
