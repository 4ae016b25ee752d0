"""Attention in 8 bits inside training: which layers have it, what is refused, and equal runs over layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalight.errors import BackendError, ConfigurationError, LayoutError
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.gpt.model import GPT
from megalight.nn import InnerAttention
from megalight.nn.init import initialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision import (
    LowPrecisionOptions,
    apply_low_precision,
    check_low_precision,
    remove_low_precision,
)
from megalight.parallel.recompute import RecomputeOptions
from megalight.plugins.precision import MegatronLowPrecision
from megalight.types import PackedSequences
from tests.strategies.training import BASE, assert_same_run, fit
from tests.support.workers import run

CONFIG = replace(BASE, hidden_size=64, ffn_hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
STEPS = 3
# `fit` reads the initial weights in a callback that says it reads none, so they must not be quantized values.
OPTIONS: dict[str, Any] = {"fp8_attention": True, "primary_weights": False, "emulate": True}


def train(options: dict[str, Any], layout: dict[str, Any]) -> Any:
    plugin = MegatronLowPrecision(LowPrecisionOptions(**options), "64-true")
    layout = {"micro_batch_size": 2, **layout}
    return fit(CONFIG, STEPS, trainer_options={"precision": None}, precision_plugin=plugin, **layout)


def test_attention_alone_changes_the_losses_a_little() -> None:
    wide, eight = (run(train, 1, {**OPTIONS, "fp8_attention": on}, {})[0]["losses"] for on in (False, True))
    assert wide != eight
    np.testing.assert_allclose(eight, wide, rtol=1e-2)


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"pipeline_parallel": 2}),
    (2, {}),
    (1, {"recompute": RecomputeOptions(granularity="selective", modules=("attention.inner",))}),
]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=["pp", "dp", "recompute"])
def test_layouts_equal_one_device(ranks: int, layout: dict[str, Any]) -> None:
    options = {**OPTIONS, "reduce_amax": False}
    expected = run(train, 1, options, {})[0]
    for found in run(train, ranks, options, layout):
        assert_same_run(found, expected)


def gpt(config: GPTConfig = CONFIG, **attention: Any) -> GPT:
    return GPT(replace(config, num_layers=4, attention=AttentionConfig(**attention)))


def give(model: GPT, **options: Any) -> GPT:
    apply_low_precision(model, LowPrecisionOptions(**{**OPTIONS, **options}), ParallelMesh(), 4)
    return model


def test_which_layers_have_it() -> None:
    model = give(gpt(), first_layers=1, last_layers=1)
    cores = [module for module in model.modules() if isinstance(module, InnerAttention)]
    assert [core.fp8 is not None for core in cores] == [False, True, True, False]
    give(model, fp8_attention=False)
    assert all(core.fp8 is None for core in cores)
    give(model)
    remove_low_precision(model)
    assert all(core.fp8 is None for core in cores)


def test_each_layer_asks_for_its_own_attention() -> None:
    """The scale of the scores is the layer's, and gradients have the format of the recipe."""
    tokens, sequences = torch.arange(16) % 7, PackedSequences.of_uniform(2, 8)

    def gradient(**options: Any) -> torch.Tensor:
        model = gpt()
        initialize(model, 1, "model.")
        give(model.double(), **options)
        model(tokens, sequences, labels=tokens).losses.sum().backward()
        found = model.layers["0"].attention.qkv.weight.grad
        assert found is not None
        return found

    usual = gradient()
    assert not torch.equal(usual, gradient(formats="e4m3"))
    assert not torch.equal(usual, gradient(power_of_two=True))
    assert torch.equal(usual, gradient())


@pytest.mark.parametrize(
    ("attention", "match"),
    [
        ({"window": 4}, "layers.0.attention has window=4"),
        ({"softcap": 30.0}, "has softcap=30.0"),
        ({"softmax": "off-by-one"}, "has softmax='off-by-one', and 8-bit attention has no sinks"),
    ],
)
def test_attention_that_has_no_8_bit_form_is_refused(attention: dict[str, Any], match: str) -> None:
    model = gpt(**attention)
    with pytest.raises(ConfigurationError, match=match):
        give(model)
    with pytest.raises(ConfigurationError, match=match):
        check_low_precision(model, LowPrecisionOptions(**OPTIONS))


def test_other_refusals() -> None:
    with pytest.raises(ConfigurationError, match="multiple of 16 up to 128, not 8"):
        give(gpt(replace(CONFIG, head_dim=8)))
    with pytest.raises(ConfigurationError, match="leave one of the two out"):
        LowPrecisionOptions(fp8_attention=True, reduce_amax=True)
    with pytest.raises(BackendError, match="emulate=True"):
        give(gpt(), emulate=False)
    model = give(gpt())
    tokens = torch.arange(16) % 7
    with pytest.raises(LayoutError, match=r"layers\.0\.attention: .* their lengths differ"):
        model(tokens, PackedSequences.of_lengths([7, 9]), labels=tokens)


def _context_parallel() -> str:
    try:
        fit(
            CONFIG,
            1,
            trainer_options={"precision": None},
            precision_plugin=MegatronLowPrecision(LowPrecisionOptions(**OPTIONS), "64-true"),
            context_parallel=2,
        )
    except ConfigurationError as error:
        return str(error)
    return ""


def test_context_parallelism_is_refused() -> None:
    for message in run(_context_parallel, 2):
        assert "attends through ContextAttention, which divides sequences over ranks" in message
