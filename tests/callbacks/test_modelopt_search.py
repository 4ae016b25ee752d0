"""AWQ, SmoothQuant and blocks of 4 bits: as ModelOpt itself finds them on one device, under the layouts that can."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megalight.callbacks import ModelOptQuantization
from megalight.errors import ConfigurationError
from megalight.inference import load_model
from megalight.models.gpt import GPT, GPTConfig
from megalight.nn.init import initialise
from megalight.plugins.modelopt import Quantizers
from megalight.plugins.modelopt.layers import register_layers
from megalight.plugins.modelopt.package import modelopt
from megalight.strategies import MegatronStrategy
from tests.environment import trainer
from tests.strategies.training import CONFIGS, SEED, WithData, global_batch
from tests.workers import run

pytest.importorskip("modelopt")
CONFIG = replace(CONFIGS["gqa"], hidden_size=256, ffn_hidden_size=256, head_dim=64)
"""Blocks of 128 features divide each half of a row."""
SQUARES = "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"
BATCHES = 2


def config_for(preset: str) -> GPTConfig:
    """Squares of 128 x 128 must also divide the rows of keys, of which each rank has half."""
    return replace(CONFIG, head_dim=128) if preset == SQUARES else CONFIG


@functools.cache
def expected(preset: str) -> tuple[nn.Module, float]:
    """The whole model quantized by ModelOpt, and its loss."""
    register_layers()
    mtq = modelopt()
    model = GPT(config_for(preset)).double()
    initialise(model, SEED, "model.")

    def loop(root: nn.Module) -> float:
        total = count = 0.0
        with torch.no_grad():
            for step in range(BATCHES):
                batch = global_batch(step)
                mask = batch.loss_mask.reshape(-1)
                losses = root(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1)).losses
                total, count = total + float((losses * mask).sum()), count + float(mask.sum())
        return total / count

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the output layer is left out
        mtq.quantize(model, copy.deepcopy(getattr(mtq, preset)), loop)
    return model, loop(model)


def validate(preset: str, layout: dict[str, Any], save_to: str | None, source: str | None) -> list[float]:
    """Calibrate and measure; with a ``source``, measure its model."""
    callbacks = [] if source else [ModelOptQuantization(preset, save_to=save_to)]
    runner = trainer(
        MegatronStrategy(**layout), callbacks=callbacks, use_distributed_sampler=False, limit_val_batches=BATCHES
    )
    module = WithData(config_for(preset), seed=SEED)
    times = 1 if source else 2
    return [runner.validate(module, ckpt_path=source, verbose=False)[0]["val_loss"] for _ in range(times)]


@pytest.mark.parametrize(
    ("preset", "world", "layout"),
    [
        ("INT4_AWQ_CFG", 2, {"pipeline_parallel": 2}),
        ("INT8_SMOOTHQUANT_CFG", 1, {}),
        (SQUARES, 2, {"tensor_parallel": 2, "sequence_parallel": True}),
        ("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", 2, {"tensor_parallel": 2, "sequence_parallel": True}),
    ],
)
def test_a_preset_finds_what_modelopt_does(preset: str, world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    wanted, loss = expected(preset)
    plain, rounded = run(validate, world, preset, layout, str(tmp_path / "q"), None, timeout=240)[0]
    assert rounded == pytest.approx(loss, rel=1e-6)
    assert plain != pytest.approx(rounded, rel=1e-4)
    found = load_model(str(tmp_path / "q"))
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(wanted, kind)())
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name].to(value.dtype), value, rtol=1e-6, atol=1e-9, msg=name)
    # the checkpoint computes the same where rows and columns are split
    split = {"tensor_parallel": 2, "sequence_parallel": True}
    assert run(validate, 2, preset, split, None, str(tmp_path / "q"), timeout=240)[0][0] == pytest.approx(rounded)


def refused(preset: str, layout: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        validate(preset, layout, None, None)
    return str(caught.value)


def test_what_cannot_be_searched_is_refused() -> None:
    assert "this run has dp=2. Calibrate on one device" in run(refused, 2, "INT4_AWQ_CFG", {})[0]
    tokens = run(refused, 2, "FP8_PER_CHANNEL_PER_TOKEN_CFG", {"tensor_parallel": 2, "sequence_parallel": True})[0]
    assert "has a scale for each token" in tokens
    with torch.device("meta"), pytest.raises(ConfigurationError, match="losses read the weight of the output layer"):
        Quantizers("INT4_AWQ_CFG", head=True).change(GPT(CONFIG))


def test_rows_that_blocks_do_not_divide_are_refused() -> None:
    assert "blocks of 128 features do not divide" in run(narrow, 1)[0]


def narrow() -> str:
    runner = trainer(
        MegatronStrategy(),
        callbacks=[ModelOptQuantization("INT4_BLOCKWISE_WEIGHT_ONLY_CFG")],
        use_distributed_sampler=False,
    )
    with pytest.raises(ConfigurationError) as caught:
        runner.validate(WithData(CONFIGS["gqa"], seed=SEED), verbose=False)
    return str(caught.value)
