"""Precision and recompute of either tower on its own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.models.gpt.model import GPT
from megalight.models.vlm import VLM
from megalight.models.vlm.module import VLMModule
from megalight.nn.init import initialise
from megalight.ops.parameter import precision_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision import LowPrecisionOptions, apply_low_precision, check_low_precision
from megalight.parallel.recompute import Recompute, apply_recompute, check_recompute
from megalight.parallel.recompute.override import Override
from tests.models.test_vlm_strategy import CONFIGS, SP, fit
from tests.models.vlm_samples import LANGUAGE, QWEN, batch
from tests.strategies.training import assert_same_gradients
from tests.workers import run

WIDE = CONFIGS["wide"]
"""Its matrices divide by 16, as products in 8 bits need it, also over two ranks."""
FULL, ACT = Recompute(granularity="full"), {"granularity": "selective", "modules": ("mlp.act",)}


def gradients(model: VLM, frozen: bool = False) -> dict[str, torch.Tensor]:
    module, found = VLMModule(QWEN), batch(config=QWEN)
    model.embed.tower.requires_grad_(not frozen)
    model.zero_grad()
    module.loss_step(module.forward_step(model, found), found).sum.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("recompute", "replaced"),
    [
        (Recompute(vision=FULL), {"embed.tower.layers.0", "embed.tower.layers.1"}),
        (Recompute(vision=Recompute(**ACT)), {f"embed.tower.layers.{i}.mlp.act" for i in range(2)}),
        (FULL, {"layers.0", "layers.1"}),
        (
            Recompute(**ACT, vision=FULL),
            {*(f"embed.tower.layers.{i}" for i in range(2)), "layers.0.mlp.act", "layers.1.mlp.act"},
        ),
    ],
    ids=["tower", "act of tower", "language", "both"],
)
def test_each_tower_has_its_own_recompute(recompute: Recompute, replaced: set[str]) -> None:
    model = VLM(QWEN).double()
    initialise(model, 3, "model.")
    expected = gradients(model)
    apply_recompute(model, recompute)
    assert {name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), Override)} == replaced
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)
    assert {name for name in expected if "tower" not in name} == gradients(model, frozen=True).keys()


def test_recompute_that_does_not_fit_is_refused() -> None:
    with torch.device("meta"):
        model, text = VLM(QWEN), GPT(LANGUAGE)
    with pytest.raises(ConfigurationError, match=r"recompute.vision is set, and GPT has no vision tower"):
        check_recompute(text, Recompute(vision=FULL))
    with pytest.raises(ConfigurationError, match=r"recompute\.num_layers=3, but a model chunk has 2 layers"):
        check_recompute(model, Recompute(vision=Recompute(granularity="full", num_layers=3)))
    with pytest.raises(ConfigurationError, match=r"'mamba' of recompute.modules matches no module"):
        check_recompute(model, Recompute(vision=Recompute(granularity="selective", modules=("mamba",))))
    with pytest.raises(ConfigurationError, match=r"recompute.vision.vision is set"):
        Recompute(vision=Recompute(vision=FULL))


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, ["layers"]),
        ({"towers": ("vision",)}, ["embed.tower.layers"]),
        ({"towers": ("language", "vision")}, ["embed.tower.layers", "layers"]),
        (
            {"towers": ("language", "vision"), "modules": ("mlp.*", "tower.attention.*")},
            ["embed.tower.layers", "layers"],
        ),
    ],
    ids=str,
)
def test_either_tower_multiplies_in_8_bits(options: dict[str, Any], places: list[str]) -> None:
    model = VLM(WIDE)
    apply_low_precision(model, LowPrecisionOptions("rowwise", emulate=True, **options), ParallelMesh())
    low = {name for name, p in model.named_parameters() if precision_of(p) is not None}
    assert sorted({re.split(r"\.\d", name)[0] for name in low}) == places
    tower = {name.split(".", 4)[-1] for name in low if "tower" in name}
    chosen = {"attention"} if "modules" in options else {"attention", "mlp"}
    assert {name.split(".")[0] for name in tower} == (chosen if tower else set())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"towers": ("sound",)}, "towers=('sound',); give a list of language and vision"),
        ({"towers": ("vision",), "last_layers": 1}, "last_layers=1 are of the language model, and towers=['vision']"),
        ({"towers": ("vision",), "modules": ("mlp.*",)}, "pattern 'mlp.*' matches no linear layer"),
    ],
    ids=str,
)
def test_precision_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigurationError, match=re.escape(message)):
        check_low_precision(VLM(WIDE), LowPrecisionOptions("rowwise", emulate=True, **options))


def test_a_text_model_has_no_vision_tower_in_8_bits() -> None:
    with torch.device("meta"), pytest.raises(ConfigurationError, match=r"\['vision'\], and GPT has no vision tower"):
        check_low_precision(GPT(LANGUAGE), LowPrecisionOptions("rowwise", towers=("vision",), emulate=True))
    odd = replace(WIDE, vision=replace(WIDE.vision, ffn_hidden_size=24))
    with torch.device("meta"), pytest.raises(ConfigurationError, match=r"embed.tower.layers.0.mlp.down"):
        check_low_precision(VLM(odd), LowPrecisionOptions("rowwise", towers=("vision",), emulate=True))


@pytest.mark.parametrize("layout", [SP, pytest.param({"pipeline_parallel": 2}, marks=pytest.mark.full)], ids=str)
def test_8_bits_in_both_towers_are_those_of_one_device(layout: dict[str, Any]) -> None:
    low = LowPrecisionOptions("rowwise", reduce_amax=True, towers=("language", "vision"), emulate=True)
    options = {"micro_batch_size": 2, "low": low}
    (expected,) = run(fit, 1, "wide", "mixed", options)
    (exact,) = run(fit, 1, "wide", "mixed", {"micro_batch_size": 2})
    assert expected["losses"] != exact["losses"]
    assert expected["losses"] == pytest.approx(exact["losses"], rel=2e-2)
    for found in run(fit, 2, "wide", "mixed", {**options, **layout}):
        assert_same_gradients(found["gradients"], expected["gradients"])
        # Later, a value between two codes may be rounded to the other one.
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
