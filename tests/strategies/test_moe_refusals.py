"""Models and layouts with experts that cannot work: said once, before a process starts, with what to do instead."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.gpt.module import GPTModule
from megalight.nn.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig, SharedConfig
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.plugins.precision import LowPrecisionOptions, MegatronLowPrecision
from megalight.strategies import MegatronStrategy, PipelineOptions
from tests.strategies.training import BASE

EP = {"expert_parallel": 2}
BESIDE = {**EP, "expert": ExpertOptions("all_to_all", shared_expert_overlap=True)}
COMBINED = {"pipeline": PipelineOptions(schedule="combined")}


class Rows(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        raise AssertionError("data is asked for")


def again(*modules: str) -> RecomputeOptions:
    return RecomputeOptions(granularity="selective", modules=modules)


def router(**options: Any) -> dict[str, Any]:
    return {"router": RouterConfig(**options)}


# What is wrong -> the model's experts, the strategy's arguments, and a part of the message: value, rule, next step.
CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]], str]] = {
    "tensor parallelism alone": (
        dict, lambda: {**EP, "tensor_parallel": 2},
        "tp=2 without sequence parallelism would send the same tokens to the experts 2 times. Switch sequence_parallel",
    ),
    "one expert by a softmax over it": (
        lambda: router(top_k=1), dict, "its weight would always be 1, .*Set moe.router.pre_softmax=true",
    ),
    "a bias of softmax scores": (
        lambda: router(expert_bias=True), dict, "score=softmax; the bias is made for sigmoid.*Set moe.router.score=",
    ),
    "an infinite step of the bias": (
        lambda: router(score="sigmoid", expert_bias=True, expert_bias_rate=float("inf")), dict,
        "expert_bias_rate is inf; it must be finite .*0.001 is usual",
    ),
    "a balance that is none": (
        lambda: {"balance": BalanceConfig(aux_loss=float("nan"))}, dict, "aux_loss is nan; it must be finite .*no such",
    ),
    "too many experts of a token": (
        lambda: router(top_k=5), dict, "top_k=5 is above moe.num_experts=4; lower the one or raise the other",
    ),
    "groups": (
        lambda: router(num_groups=3, group_top_k=1), dict, "4 experts do not divide into num_groups=3",
    ),
    "capacity under Sinkhorn": (
        lambda: {**router(pre_softmax=True, sinkhorn=True), "capacity": CapacityConfig(factor=1.0)}, dict,
        "sinkhorn=true with moe.capacity.*Leave out one of the two",
    ),
    "losses under Sinkhorn": (
        lambda: {**router(pre_softmax=True, sinkhorn=True), "balance": BalanceConfig(aux_loss=0.1)}, dict,
        "sinkhorn=true balances the experts itself. Leave",
    ),
    "weights on inputs of several experts": (
        lambda: {"weigh_input": True}, dict, "weigh_input=true with moe.router.top_k=2.*Set top_k=1, or leave",
    ),
    "experts over ranks": (
        lambda: {"num_experts": 3}, lambda: EP, "holds 3 experts, and ep=2 does not divide them. Lower ep",
    ),
    "inner width over ranks": (
        lambda: {"ffn_hidden_size": 9}, lambda: {"expert_tensor_parallel": 2}, "width of 9, and etp=2 does not divide",
    ),
    "ranks over experts' ranks": (
        dict, lambda: {"expert_parallel": 3}, "world size 4 is not a multiple of etp x ep x pp = 3",
    ),
    "biases of divided experts": (
        lambda: {"bias": True}, lambda: {"expert_tensor_parallel": 2}, "etp=2 divides experts with biases.*Set etp=1",
    ),
    "no package": (
        dict, lambda: {**EP, "expert": ExpertOptions("deepep")}, "dispatcher='deepep' cannot serve.*all_to_all",
    ),
    "no such package either": (
        dict, lambda: {**EP, "expert": ExpertOptions("hybridep")}, "dispatcher='hybridep' cannot serve.*all_to_all",
    ),
    "no symmetric memory": (
        dict, lambda: {**EP, "expert": ExpertOptions("symmetric")}, "dispatcher='symmetric' cannot serve.*all_to_all",
    ),
    "no dispatcher": (dict, lambda: {"expert": ExpertOptions("flex")}, "'flex'.*all_to_all"),
    "SMs of nobody": (
        dict, lambda: {"expert": ExpertOptions(num_sms=20)}, "num_sms=20 with dispatcher='all_to_all'",
    ),
    "shared experts beside messages that block": (
        dict, lambda: {"expert": ExpertOptions("all_gather", shared_expert_overlap=True)},
        "shared_expert_overlap=True with dispatcher='all_gather'.*Set dispatcher='all_to_all'",
    ),
    "shared experts beside messages and again": (
        lambda: {"shared": SharedConfig(ffn_hidden_size=8)}, lambda: {**BESIDE, "recompute": again("shared_experts")},
        "shared_expert_overlap=True with recompute.modules=.*Leave out one of the two",
    ),
    "shared experts beside another pass": (
        lambda: {"shared": SharedConfig(ffn_hidden_size=8)}, lambda: {**BESIDE, **COMBINED},
        "shared_expert_overlap=True with pipeline.schedule='combined'.*Leave out one of the two",
    ),
    "no shared expert": (dict, lambda: BESIDE, "no layer has a shared expert. Leave it out"),
    "passes in turns without messages": (
        dict, lambda: COMBINED, "'combined' hides the messages of experts.*Raise expert_parallel, or choose",
    ),
    "passes in turns around messages that block": (
        dict, lambda: {**EP, **COMBINED, "expert": ExpertOptions("all_gather")},
        "whose messages block. Set dispatcher='all_to_all', or choose another schedule",
    ),
    "recompute of what there is not": (
        dict, lambda: {**EP, "recompute": again("shared_experts")}, "mlp.shared",
    ),
}  # fmt: skip


def fit(moe: Callable[[], dict[str, Any]], options: Callable[[], dict[str, Any]]) -> None:
    config = replace(BASE, moe=MoEConfig(**{"num_experts": 4, "ffn_hidden_size": 8, **moe()}))
    pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=MegatronStrategy(**options()),
        logger=False,
        enable_checkpointing=False,
        max_steps=1,
    ).fit(GPTModule(config), datamodule=Rows())


@pytest.mark.parametrize(
    ("low", "message"),
    [
        ({"modules": ["mlp.expert.*"]}, "matches no linear layer.*mlp.experts.up"),
        ({"modules": ["mlp.experts.*"]}, r"layers.0.mlp.experts.down has a weight of .* needs multiples of 16"),
        ({"first_layers": 2}, "leave none of 2 layers"),
    ],
)
def test_8_bits_refused_before_a_process_starts(
    low: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    plugin = MegatronLowPrecision(LowPrecisionOptions(emulate=True, **low))
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        fit(dict, lambda: {**EP, "precision_plugin": plugin})
    assert not dist.is_initialized()


@pytest.mark.parametrize(("moe", "options", "message"), CASES.values(), ids=CASES.keys())
def test_refused_before_a_process_starts(
    moe: Callable[[], dict[str, Any]],
    options: Callable[[], dict[str, Any]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises((ConfigurationError, LayoutError)) as caught:
        fit(moe, options)
    assert re.search(f"(?s){message}", str(caught.value)), caught.value
    assert not dist.is_initialized()
    assert "WORLD_SIZE" not in os.environ
