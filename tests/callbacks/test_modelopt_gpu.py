"""Formats that ModelOpt rounds to on CUDA alone: as it rounds the whole model, and as the packed weights say."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from megalight.callbacks import ModelOptQuantization
from megalight.inference import load_model
from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from megalight.plugins.modelopt.export import decode
from megalight.plugins.modelopt.layers import register_layers
from megalight.plugins.modelopt.presets import modelopt
from megalight.strategies import MegatronStrategy
from tests.callbacks.test_modelopt_search import BATCHES, CONFIG
from tests.strategies.training import SEED, WithData, global_batch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]
pytest.importorskip("modelopt")


def by_modelopt(preset: str, kv: str | None) -> tuple[nn.Module, float]:
    """The whole model in ModelOpt's hands, and its loss."""
    register_layers()
    mtq, model = modelopt(), GPT(CONFIG).float().cuda()
    # devices draw different numbers
    initialize(model, SEED, "model.")

    def loop(root: nn.Module) -> float:
        total = count = 0.0
        with torch.no_grad():
            for step in range(BATCHES):
                batch = global_batch(step)
                mask = batch.loss_mask.reshape(-1).cuda()
                tokens, labels = (each.reshape(-1).cuda() for each in (batch.tokens, batch.labels))
                losses = root(tokens, batch.sequences.to("cuda"), labels=labels).losses
                total, count = total + float((losses * mask).sum()), count + float(mask.sum())
        return total / count

    config = copy.deepcopy(getattr(mtq, preset))
    config["quant_cfg"] += copy.deepcopy(getattr(mtq, kv)["quant_cfg"]) if kv else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mtq.quantize(model, config, loop)
    return model, loop(model)


@pytest.mark.parametrize(
    ("preset", "kv"),
    [
        ("NVFP4_DEFAULT_CFG", None),
        ("NVFP4_DEFAULT_CFG", "NVFP4_KV_CFG"),
        ("NVFP4_AWQ_LITE_CFG", None),
        ("W4A8_NVFP4_FP8_CFG", None),
        ("MXFP4_DEFAULT_CFG", None),
        ("MXFP6_DEFAULT_CFG", None),
        ("MXFP8_DEFAULT_CFG", None),
    ],
)
def test_a_model_rounds_as_by_modelopt(preset: str, kv: str | None, tmp_path: Any) -> None:
    wanted, loss = by_modelopt(preset, kv)
    runner = pl.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=MegatronStrategy(),
        precision="32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=BATCHES,
        callbacks=[ModelOptQuantization(preset, kv=kv, save_to=tmp_path / "q")],
    )
    module = WithData(CONFIG, seed=SEED)
    plain, rounded = (runner.validate(module, verbose=False)[0]["val_loss"] for _ in range(2))
    assert rounded == pytest.approx(loss, rel=1e-4)
    assert abs(plain - loss) > 1e-5 * loss
    found, theirs = load_model(str(tmp_path / "q")), dict(wanted.named_buffers())
    for name, value in found.named_buffers():
        if name.endswith("_amax"):
            torch.testing.assert_close(value, theirs[name].cpu().view_as(value), rtol=1e-4, atol=0, msg=name)
    batch = global_batch(0).to("cuda")
    with torch.no_grad():
        own, his = (each(batch.tokens.reshape(-1), batch.sequences).logits for each in (found.cuda(), wanted))
    torch.testing.assert_close(own, his, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("preset", ["NVFP4_DEFAULT_CFG", "MXFP4_DEFAULT_CFG", "MXFP8_DEFAULT_CFG"])
def test_packed_weights_are_the_rounded_ones(preset: str) -> None:
    """What a CPU packs is what CUDA computes with."""
    model, _ = by_modelopt(preset, None)
    layer: Any = model.get_submodule("layers.1.mlp.down")
    utils = modelopt("torch.export.quant_utils")
    exact = layer.weight_quantizer(layer.weight).detach().cpu()
    form, block = utils.get_quantization_format(layer), utils.get_weight_block_size(layer)
    layer.cpu()
    scale, second = utils.get_weight_scaling_factor(layer), utils.get_weight_scaling_factor_2(layer)
    quantized = utils.to_quantized_weight(layer.weight.detach(), scale, form, second, block)
    found = decode(quantized, scale.reshape(len(quantized), -1), second)
    # kernels may break ties of float32 quotients the other way
    different = ~torch.isclose(found, exact, rtol=1e-4, atol=1e-7)
    assert float(different.float().mean()) < 1e-3
