"""A GPT with multi-token prediction trains under every layout as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megalight.errors import LayoutError
from megalight.models.gpt import GPT, AttentionConfig, GPTConfig, MultiTokenConfig
from megalight.nn.moe import BalanceConfig, MoEConfig
from megalight.optim import AdamConfig, GroupRule
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import PipelineOptions
from tests.strategies.test_mamba import HYBRID
from tests.strategies.training import CONFIGS, Gradients, WithData, assert_same_gradients, assert_same_run, by_hand, fit
from tests.support.workers import run

TWO = MultiTokenConfig(num_layers=2, loss_scale=0.7)
MODELS = {
    "two": replace(CONFIGS["gqa"], mtp=TWO),
    # a learned position of a later token, and three places of one weight
    "learned": replace(CONFIGS["gpt2"], mtp=TWO, attention=AttentionConfig(window=3)),
    "experts": replace(
        CONFIGS["gqa"],
        num_layers=4,
        mtp=MultiTokenConfig(loss_scale=0.7),
        moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True), balance=BalanceConfig(z_loss=0.01)),
    ),
}
MODELS["hybrid"] = replace(HYBRID, mtp=MultiTokenConfig(num_layers=2, loss_scale=0.7, pattern="M*"))
SP = {"tensor_parallel": 2, "sequence_parallel": True}
PP = {"pipeline_parallel": 2, "micro_batch_size": 1}
WHOLE = RecomputeOptions(granularity="full")
SOME = RecomputeOptions(granularity="selective", modules=("core_attn", "*_norm", "mlp.act"))
ZERO_BUBBLE = {**PP, "pipeline": PipelineOptions(schedule="zero_bubble")}
LAYOUTS: list[Any] = [
    ("two", 2, {**SP, "recompute": SOME}),
    pytest.param("learned", 2, {**PP, "recompute": WHOLE}, marks=pytest.mark.full),
    ("two", 2, {**ZERO_BUBBLE, "pipeline_layout": "Et|t|mm|L"}),
    ("learned", 2, {"context_parallel": 2}),
    pytest.param(
        "experts",
        4,
        {**PP, "virtual_pipeline": 2, "expert_parallel": 2, "pipeline": PipelineOptions(schedule="combined")},
        marks=pytest.mark.full,
    ),
    pytest.param("hybrid", 2, {**SP, "recompute": WHOLE}, marks=pytest.mark.full),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            ("hybrid", 2, {**ZERO_BUBBLE, "recompute": SOME}),
            ("hybrid", 4, {**PP, "context_parallel": 2}),
            ("hybrid", 2, {"options": {"level": "optim_grads_params"}}),
            ("two", 2, {"tensor_parallel": 2, "recompute": WHOLE}),
            ("learned", 2, SP),
            ("two", 2, PP),
            ("two", 2, ZERO_BUBBLE),
            ("learned", 4, {**PP, **SP, "recompute": WHOLE}),
            ("two", 4, {**PP, "context_parallel": 2, "recompute": SOME}),
            ("learned", 4, {**SP, "context_parallel": 2}),
            *[
                ("two", 2, {"context_parallel": 2, "context": ContextOptions(kind=kind), "recompute": WHOLE})
                for kind in ("ring", "all_gather", "all_to_all")
            ],
            ("experts", 2, {"expert_parallel": 2, "recompute": WHOLE}),
            ("experts", 2, {"expert_parallel": 2, "pipeline": PipelineOptions(schedule="combined")}),
            ("experts", 4, {**PP, "virtual_pipeline": 2, "expert_parallel": 2, "recompute": WHOLE}),
            ("two", 2, {"options": {"level": "optim_grads_params"}}),
            ("learned", 2, {"options": {"level": "optim_grads_params"}, "recompute": WHOLE}),
            # the weight of embedding and head is sharded on the first stage, and whole on the last one
            ("learned", 4, {**PP, "options": {"level": "optim_grads_params"}, "recompute": WHOLE}),
            ("two", 4, {**ZERO_BUBBLE, "options": {"level": "optim_grads_params"}}),
        ]
    ],
]


@functools.cache
def expected(name: str, micro_batch_size: int | None) -> dict[str, Any]:
    return by_hand(MODELS[name], packed=True, micro_batch_size=micro_batch_size)


def _rank(name: str, options: dict[str, Any]) -> dict[str, Any]:
    gradients = Gradients()
    extra = () if "options" in options else (gradients,)  # sharded gradients come and go
    found = fit(MODELS[name], packed=True, extra_callbacks=extra, **options)
    return {**found, "gradients": gradients.first}


@pytest.mark.parametrize(("name", "ranks", "options"), LAYOUTS)
def test_layout_trains_the_same_model(name: str, ranks: int, options: dict[str, Any]) -> None:
    found = run(_rank, ranks, name, options)
    # the z loss of a router is a mean over each micro-batch
    wanted = expected(name, options.get("micro_batch_size") if name == "experts" else None)
    if found[0]["gradients"]:
        assert_same_gradients(found[0]["gradients"], wanted["gradients"])
    assert_same_run(found[0], wanted)
    depths = range(1, MODELS[name].num_depths + 1)
    for each in found:
        for depth in depths:
            scaled, plain = each["metrics"][f"train_mtp_{depth}"], each["metrics"][f"train_mtp_{depth}_loss"]
            assert scaled == pytest.approx(plain * 0.7 / len(depths))
            assert plain > 1


class SlowEmbedding(WithData):
    def __init__(self, config: GPTConfig, optimizer: AdamConfig, seed: int) -> None:
        super().__init__(config, replace(optimizer, rules=(GroupRule("model.embed.*", lr_scale=0.01),)), seed)


class Embeddings(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.found = [weight.detach().clone() for name, weight in module.named_parameters() if "embed.word" in name]


def _embeddings() -> list[torch.Tensor]:
    embeddings = Embeddings()
    fit(MODELS["two"], module_type=SlowEmbedding, extra_callbacks=[embeddings], **PP)
    return embeddings.found


def test_rules_by_name_hold_for_all_copies_of_the_embedding() -> None:
    (first,), (last,) = run(_embeddings, 2)
    assert torch.equal(first, last)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|tL", "names 0 multi-token-prediction layers 'm', but the model has 2. Write 2"),
        ("Ettm|mL", "on different stages"),
        ("Etmm|tL", "layers 't' follow"),
    ],
)
def test_depths_need_a_place(text: str, message: str) -> None:
    with torch.device("meta"):
        model = GPT(replace(MODELS["two"], num_layers=2))
    with pytest.raises(LayoutError, match=message):
        Layout(pipeline_parallel=2, pipeline_layout=text).stages(model, ParallelMesh(2, 0, pp=2))
