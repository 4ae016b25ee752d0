"""Full sharding of the stages of a pipeline equals one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest

from megalight.callbacks import Adapters
from megalight.nn.moe import MoEConfig
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.reduce import Reducer
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.precision import LowPrecisionOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.plugins.precision import MegatronLowPrecision
from tests.strategies.test_full_sharding import Uneven
from tests.strategies.training import (
    CONFIGS,
    Gradients,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    fit,
)
from tests.support.workers import run

STEPS = 3
FULL, GRADS = "optim_grads_params", "optim_grads"
PP = {"pipeline_parallel": 2}
VPP = {**PP, "virtual_pipeline": 2}
UNEVEN = {**PP, "pipeline_layout": "Ett|tL"}
TP = {"tensor_parallel": 2, "sequence_parallel": True}
ZERO_BUBBLE = {"pipeline": PipelineOptions(schedule="zero_bubble")}
WHOLE = {"reduce_each_micro_batch": False}
LAYERS = {"data_parallel": {"units": ("TransformerLayer",)}}


MOE = replace(CONFIGS["gqa"], num_layers=4, moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True)))
MODELS = {"tied": replace(CONFIGS["tied"], num_layers=3), "gqa": replace(CONFIGS["gqa"], num_layers=4), "experts": MOE}

CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "tied": (4, "tied", FULL, UNEVEN),
    "zero bubble": (4, "gqa", FULL, {**VPP, **ZERO_BUBBLE}),
}
FURTHER: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "gradients": (4, "tied", GRADS, UNEVEN),
    "chunks": (4, "gqa", FULL, VPP),
    "gradients of chunks": (4, "gqa", GRADS, VPP),
    "deeper": (4, "gqa", FULL, {**VPP, "data_parallel": {"prefetch": 2}}),
    "nothing ahead": (4, "gqa", FULL, {**VPP, "data_parallel": {"prefetch": 0}}),
    "delayed": (4, "tied", FULL, {**UNEVEN, **ZERO_BUBBLE}),
    "delayed, gradients": (4, "gqa", GRADS, {**VPP, **ZERO_BUBBLE}),
    "delayed, whole gradients": (4, "gqa", FULL, {**VPP, **ZERO_BUBBLE, "data_parallel": WHOLE}),
    "whole gradients": (4, "tied", FULL, {**UNEVEN, "data_parallel": WHOLE}),
    "recompute": (4, "gqa", FULL, {**VPP, "recompute": RecomputeOptions(granularity="full", num_layers=1)}),
    "host": (4, "tied", FULL, {**UNEVEN, "data_parallel": {"optimizer_offload_fraction": 0.5}}),
    "cp": (4, "gqa", FULL, {**VPP, "context_parallel": 2, "context": ContextOptions(kind="ring")}),
    "tp": (8, "gqa", FULL, {**PP, **TP}),
    "hybrid": (8, "tied", FULL, {**UNEVEN, "data_parallel": {"replicate": 2}}),
    "experts": (4, "experts", FULL, {**VPP, "expert_parallel": 2}),
    "delayed experts": (4, "experts", FULL, {**PP, **ZERO_BUBBLE, "expert_parallel": 2}),
    "no unit on a stage": (8, "gqa", FULL, {"pipeline_parallel": 4, "pipeline_layout": "E|t*4||L", **LAYERS}),
    "uneven replicas": (6, "gqa", FULL, {**VPP, "module_type": Uneven}),
}
"""Ranks, model, level, options."""


@functools.cache
def _expected(config: str) -> dict[str, Any]:
    return by_hand(MODELS[config], STEPS, micro_batch_size=1 if config == "experts" else None)


def _trained(config: str, level: str, options: dict[str, Any]) -> dict[str, Any]:
    gradients, options = Gradients(), dict(options)
    data_parallel = {"level": level, **options.pop("data_parallel", {})}
    found = fit(MODELS[config], STEPS, data_parallel, extra_callbacks=[gradients], micro_batch_size=1, **options)
    return {**found, "gradients": gradients.first}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in FURTHER)])
def test_equals_one_device(case: str) -> None:
    world, config, level, options = (CASES | FURTHER)[case]
    expected = _expected(config)
    for found in run(_trained, world, config, level, options):
        assert_same_run(found, expected)
        assert_same_gradients(found["gradients"], expected["gradients"])


BESIDE: dict[str, dict[str, Any]] = {
    "accumulation and validation": {"trainer_options": {"accumulate_grad_batches": 2, "limit_val_batches": 1}},
    "adapters": {},
    "eight bits": {"trainer_options": {"precision": None}},
}


def _beside(what: str, level: str) -> dict[str, Any]:
    options, callbacks = dict(BESIDE[what]), list[pl.Callback]()
    config = replace(CONFIGS["mha"], num_layers=4, hidden_size=64, ffn_hidden_size=64)
    if what == "adapters":
        callbacks = [Adapters(rank=3, targets=["layers.*"], alpha=6.0)]
    elif what == "eight bits":
        recipe = LowPrecisionOptions(recipe="tensorwise", emulate=True, primary_weights=True)
        options["precision_plugin"] = MegatronLowPrecision(recipe, "64-true")
    return fit(config, options={"level": level}, extra_callbacks=callbacks, micro_batch_size=1, **VPP, **options)


def _with_both_levels(what: str) -> list[dict[str, Any]]:
    return [_beside(what, level) for level in ("optim", FULL)]


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("adapters", marks=pytest.mark.full),
        *(pytest.param(w, marks=pytest.mark.full) for w in list(BESIDE)[::2]),
    ],
)
def test_what_runs_beside_is_as_on_level_optim(what: str) -> None:
    """Steps of several batches with evaluation between them, adapters on frozen weights, FP8 weights."""
    for expected, found in run(_with_both_levels, 4, what):
        for name in ("losses", "norms"):
            assert found[name]
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-9)
        for name, value in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-7), name
        for name, value in expected["final"].items():
            np.testing.assert_allclose(found["final"][name], value, rtol=1e-7, atol=1e-9, err_msg=name)


def _reductions(schedule: str) -> int:
    count, real = 0, Reducer.start_adding

    def counted(self: Reducer, bucket: Bucket, first: bool) -> Callable[[], object]:
        nonlocal count
        count += 1
        return real(self, bucket, first)

    with mock.patch.object(Reducer, "start_adding", counted):
        fit(MODELS["gqa"], 1, {"level": FULL}, micro_batch_size=1, pipeline=PipelineOptions(schedule=schedule), **PP)
    return count


def test_put_off_gradients_are_summed_with_those_that_came_before() -> None:
    """Each micro-batch sums each unit once, as without the split of backward passes."""
    plain = run(_reductions, 4, "1f1b")
    assert min(plain) > 0
    assert run(_reductions, 4, "zero_bubble") == plain


def _unknown_class() -> None:
    fit(MODELS["gqa"], options={"level": FULL, "units": ("Blok",)}, **PP)


def test_a_class_of_units_must_be_on_some_stage() -> None:
    with pytest.raises(AssertionError, match=r"units names 'Blok', and no outermost module of GPT is one"):
        run(_unknown_class, 2)
