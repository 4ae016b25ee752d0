"""Precision and recompute of either tower on its own."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megalight.data.multimodal.images import Images
from megalight.errors import ConfigurationError
from megalight.models.gpt.model import GPT
from megalight.models.vision.model import PackedImages
from megalight.models.vlm import VLM, VLMConfig, task
from megalight.models.vlm.module import VLMModule
from megalight.nn.init import initialize
from megalight.ops.linear.low_precision import precision_of
from megalight.parallel.layers import Override
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision import (
    LowPrecisionOptions,
    apply_low_precision,
    check_low_precision,
    options_of_part,
)
from megalight.parallel.recompute import RecomputeOptions, apply_recompute, check_recompute
from megalight.plugins.transformer_engine.low_precision import TransformerEngineProducts
from megalight.strategies import DataParallelOptions, Layout
from tests.models.test_vlm_strategy import CONFIGS, SP, fit
from tests.models.vlm_samples import LANGUAGE, QWEN, batch
from tests.strategies.training import assert_same_gradients
from tests.support.workers import run

WIDE = CONFIGS["wide"]
"""Its matrices divide by 16, as products in 8 bits need it, also over two ranks."""
ODD = CONFIGS["odd"]
"""The MLP of its tower has 26 features, as that of Qwen2.5-VL has 3,420."""
FULL, ACT = RecomputeOptions(granularity="full"), {"granularity": "selective", "modules": ("mlp.act",)}


def gradients(model: VLM, frozen: bool = False) -> dict[str, torch.Tensor]:
    module, found = VLMModule(QWEN), batch(config=QWEN)
    model.embed.tower.requires_grad_(not frozen)
    model.zero_grad()
    module.loss_step(module.forward_step(model, found), found).sum.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("recompute", "replaced"),
    [
        (RecomputeOptions(vision=FULL), {"embed.tower.layers.0", "embed.tower.layers.1"}),
        (RecomputeOptions(vision=RecomputeOptions(**ACT)), {f"embed.tower.layers.{i}.mlp.act" for i in range(2)}),
        (FULL, {"layers.0", "layers.1"}),
        (
            RecomputeOptions(**ACT, vision=FULL),
            {*(f"embed.tower.layers.{i}" for i in range(2)), "layers.0.mlp.act", "layers.1.mlp.act"},
        ),
    ],
    ids=["tower", "act of tower", "language", "both"],
)
def test_each_tower_has_its_own_recompute(recompute: RecomputeOptions, replaced: set[str]) -> None:
    model = VLM(QWEN).double()
    initialize(model, 3, "model.")
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
        check_recompute(text, RecomputeOptions(vision=FULL))
    with pytest.raises(ConfigurationError, match=r"recompute\.num_layers=3, but a model chunk has 2 layers"):
        check_recompute(model, RecomputeOptions(vision=RecomputeOptions(granularity="full", num_layers=3)))
    with pytest.raises(ConfigurationError, match=r"'mamba' of recompute.vision.modules matches no module"):
        check_recompute(model, RecomputeOptions(vision=RecomputeOptions(granularity="selective", modules=("mamba",))))
    with pytest.raises(ConfigurationError, match=r"recompute.vision.vision is set"):
        RecomputeOptions(vision=RecomputeOptions(vision=FULL))


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
        ({"towers": ("sound",)}, "towers=('sound',); 'sound' is no tower. Give a list of language and vision"),
        (
            {"towers": ("language", "visoin")},
            "'visoin' is no tower. Give a list of language and vision, or",
        ),
        ({"towers": ("visoin",)}, "in a list. Did you mean 'vision'?"),
        ({"towers": "vision"}, "towers='vision'. Give a list"),
        ({"towers": ()}, "towers=(). Give a list"),
        ({"towers": ("vision",), "modules": ("towr.mlp.*",)}, "Did you mean 'tower.mlp.*'?"),
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


def test_a_tower_of_odd_sizes_in_8_bits_needs_our_own_products() -> None:
    options = LowPrecisionOptions("tensorwise", towers=("vision",))
    with torch.device("meta"):
        model = VLM(ODD)
    check_low_precision(model, options)
    with pytest.raises(ConfigurationError, match=r"embed.tower.layers.0.mlp.gate_up has a weight of .52, 32.*'own'"):
        check_low_precision(model, options, TransformerEngineProducts)


DISJOINT = {"placement": "disjoint"}


@functools.cache
def of_one_device(low: LowPrecisionOptions | None, name: str = "wide") -> dict[str, Any]:
    return run(fit, 1, name, "mixed", {"micro_batch_size": 2, "low": low})[0]


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("delayed", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, SP),
        pytest.param(3, {**SP, **DISJOINT, "tower": Layout()}, marks=pytest.mark.full),
        # Replicas that divide images would scale other rows together, so either side has one.
        (2, {"pipeline_parallel": 2, "tower": Layout(**SP)}),
        pytest.param(
            4,
            {**DISJOINT, "tower": Layout(ranks=2), "data_parallel": DataParallelOptions(level="optim_grads_params")},
            marks=pytest.mark.full,
        ),
        pytest.param(2, {"pipeline_parallel": 2}, marks=pytest.mark.full),
        pytest.param(3, {**DISJOINT, "tower": Layout(ranks=2, **SP)}, marks=pytest.mark.full),
        pytest.param(2, {**SP, "tower": Layout(tensor_parallel=2)}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_8_bits_in_both_towers_are_those_of_one_device(recipe: str, ranks: int, layout: dict[str, Any]) -> None:
    agrees = {"reduce_amax": True} if recipe == "rowwise" else {"modules": ("mlp.*", "tower.attention.*")}
    low = LowPrecisionOptions(recipe, towers=("language", "vision"), emulate=True, **agrees)
    expected, exact = of_one_device(low), of_one_device(None)
    assert expected["losses"] != exact["losses"]
    assert expected["losses"] == pytest.approx(exact["losses"], rel=2e-2)
    found = run(fit, ranks, "wide", "mixed", {"micro_batch_size": 2, "low": low, **layout})
    gradients = {name: value for rank in found for name, value in rank["gradients"].items()}
    assert_same_gradients(gradients, expected["gradients"])
    for rank in found:
        # Later, a value between two quantized values may be rounded to the other one.
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "ranks", "layout"),
    [
        pytest.param("tensorwise", 2, {"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param("delayed", 2, {"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param("rowwise", 2, {"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param("delayed", 2, {**DISJOINT, "tower": Layout()}, marks=pytest.mark.full),
        pytest.param("blockwise", 2, {"pipeline_parallel": 2}, marks=pytest.mark.full),
        pytest.param("mxfp8", 2, {**DISJOINT, "tower": Layout()}, marks=pytest.mark.full),
        pytest.param(
            "delayed", 2, {"data_parallel": DataParallelOptions(level="optim_grads_params")}, marks=pytest.mark.full
        ),
        pytest.param("delayed", 2, SP, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_tower_of_odd_sizes_in_8_bits_is_that_of_one_device(recipe: str, ranks: int, layout: dict[str, Any]) -> None:
    """Also where tensor parallelism makes parts of 13 features, whose zeros go to other places."""
    agrees = {"reduce_amax": True} if recipe in ("tensorwise", "rowwise") else {}
    low = LowPrecisionOptions(recipe, towers=("language", "vision"), emulate=True, **agrees)
    expected, exact = of_one_device(low, "odd"), of_one_device(None, "odd")
    assert expected["losses"] != exact["losses"]
    assert expected["losses"] == pytest.approx(exact["losses"], rel=2e-2)
    found = run(fit, ranks, "odd", "mixed", {"micro_batch_size": 2, "low": low, **layout})
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    gradients = {name: value for rank in found for name, value in rank["gradients"].items()}
    assert_same_gradients(gradients, expected["gradients"])


def fit_padded(counts: str, options: dict[str, Any], multiple: int) -> dict[str, Any]:
    """Train as ``fit``, with rows of images filled up to another multiple than the layout's."""
    plain = task.pack_images

    def padded(config: VLMConfig, images: Images, source: torch.Tensor, _: int) -> PackedImages:
        return plain(config, images, source, multiple)

    with mock.patch.object(task, "pack_images", padded):
        return fit("wide", counts, options)


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=pytest.mark.full) for r in ("delayed", "tensorwise", "rowwise")]
)
def test_rows_of_padding_count_for_scales(recipe: str) -> None:
    """Sequence parallelism fills rows of images up, and their values are cast with the others.

    So scales differ from those of one device, which has no such rows, and after some steps losses. With these rows on
    one device, nothing differs.
    """
    agrees = {} if recipe == "delayed" else {"reduce_amax": True}
    options = {
        "micro_batch_size": 2,
        "low": LowPrecisionOptions(recipe, towers=("language", "vision"), emulate=True, **agrees),
    }
    found = run(fit, 2, "wide", "six", {**options, **SP})[0]
    padded, plain = (run(fit_padded, 1, "six", options, multiple)[0] for multiple in (2, 1))
    assert found["losses"] == pytest.approx(padded["losses"], rel=1e-12)
    assert found["losses"][:2] == pytest.approx(plain["losses"][:2], rel=1e-12)
    assert found["losses"] != pytest.approx(plain["losses"], rel=1e-6)
    assert found["losses"] == pytest.approx(plain["losses"], rel=5e-3)


CP = Layout(context_parallel=2)


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {**SP, "tower": CP}),
        pytest.param(3, {**DISJOINT, "tower": replace(CP, ranks=2)}, marks=pytest.mark.full),
        pytest.param(4, {"tower": replace(CP, ranks=4, **SP), **SP}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_8_bits_in_a_tower_whose_ranks_share_rows(recipe: str, ranks: int, layout: dict[str, Any]) -> None:
    """Scales of single rows are those of one device, and all is equal. Those of many rows are of each rank's own run.

    In ``rowwise`` these are in gradients of weights alone.
    """
    low = LowPrecisionOptions(recipe, towers=("vision",), emulate=True, reduce_amax=True)
    expected, exact = of_one_device(low), of_one_device(None)
    found = run(fit, ranks, "wide", "mixed", {"micro_batch_size": 2, "low": low, **layout})
    gradients = {name: value for rank in found for name, value in rank["gradients"].items()}
    assert gradients.keys() == expected["gradients"].keys()
    rounded = {name for name in gradients if re.search(r"tower\.layers\..*(attention|mlp)\..*weight", name)}
    if recipe == "rowwise":
        assert found[0]["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-9)
        others = gradients.keys() - rounded
        assert_same_gradients(*({name: each[name] for name in others} for each in (gradients, expected["gradients"])))
    assert len(rounded) == 2 * 7
    for name in rounded:
        whole = expected["gradients"][name]
        error, usual = (np.linalg.norm(each[name] - whole) for each in (gradients, exact["gradients"]))
        assert 1e-3 * usual < error < 1.5 * usual, f"8 bits alone change {name} by {usual:.1e}, the runs by {error:.1e}"
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=2e-3)


@pytest.mark.parametrize("towers", ["language", "vision"])
def test_8_bits_in_one_of_two_disjoint_towers(towers: str) -> None:
    low = LowPrecisionOptions("rowwise", towers=(towers,), emulate=True)
    found, expected = (
        run(fit, 2, "wide", "mixed", {"micro_batch_size": 2, "low": low, **DISJOINT, "tower": Layout()}),
        of_one_device(low),
    )
    assert_same_gradients(found[0]["gradients"] | found[1]["gradients"], expected["gradients"])


def test_8_bits_of_parts_are_those_of_the_whole() -> None:
    with torch.device("meta"):
        model = VLM(WIDE)
    both = LowPrecisionOptions("rowwise", towers=("language", "vision"), modules=("mlp.*", "tower.attention.*"))
    assert options_of_part(model, both, "vision") == replace(both, towers=("vision",), modules=("tower.attention.*",))
    assert options_of_part(model, both, "language") == replace(both, towers=("language",), modules=("mlp.*",))
    assert options_of_part(model, LowPrecisionOptions("rowwise"), "vision") is None
    with pytest.raises(ConfigurationError, match=r"pattern 'sound\.\*' matches no linear layer"):
        options_of_part(model, replace(both, modules=("*", "sound.*")), "vision")
