"""Blocks of floating-point elements: packed bytes against a float64 reference, and against ModelOpt's own tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import megalight
from megalight.cli.main import main
from megalight.errors import ConfigurationError
from megalight.inference import load_model
from megalight.models.gpt import GPT
from megalight.plugins.modelopt import Quantizers, check_device
from megalight.plugins.modelopt.export import decode, export_quantized, plain_weights
from megalight.plugins.modelopt.presets import modelopt
from tests.plugins.test_modelopt_export import calibrate, theirs
from tests.strategies.training import BASE
from tests.support.workers import run

pytest.importorskip("modelopt")
pytest.importorskip("transformers")


def nearest(x: Tensor, exponent_bits: int, mantissa_bits: int, largest: float) -> Tensor:
    """Round to the nearest small floating-point number, ties to even, by the definition of such numbers."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = x.abs().clamp(min=2.0**-200).log2().floor().clamp(min=1 - bias)
    step = torch.exp2(exponent - mantissa_bits)
    # torch rounds ties to even, as the formats do
    return ((x / step).round() * step).clamp(-largest, largest)


def blocks_of(weight: Tensor, size: int) -> Tensor:
    return weight.double().unflatten(1, (-1, size))


def nvfp4(weight: Tensor, amax: Tensor, most: float = 448.0) -> Tensor:
    """E2M1 by 16, scales in E4M3, and one scale of these."""
    second = (amax.float() / (6 * most)).double()
    parts = blocks_of(weight, 16)
    scale = nearest((parts.abs().amax(-1, keepdim=True).float() / (6 * second.float())).double(), 4, 3, 448.0)
    return (nearest(parts / (scale * second), 2, 1, 6.0) * scale * second).flatten(1)


def mx(weight: Tensor, bits: tuple[int, int], largest: float) -> Tensor:
    """By 32, with powers of two as scales: the smallest that holds the largest element."""
    parts = blocks_of(weight, 32)
    scale = torch.exp2((parts.abs().amax(-1, keepdim=True) / largest).log2().ceil())
    return (nearest(parts / scale, *bits, largest) * scale).flatten(1)


REFERENCES: dict[str, Any] = {
    "NVFP4_DEFAULT_CFG": nvfp4,
    "MXFP4_DEFAULT_CFG": lambda weight, _: mx(weight, (2, 1), 6.0),
    "MXFP8_DEFAULT_CFG": lambda weight, _: mx(weight, (4, 3), 448.0),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("packing") / "plain")
    theirs("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("preset", list(REFERENCES))
def test_packed_weights_are_those_of_a_reference(preset: str, plain: str, tmp_path: Any) -> None:
    run(calibrate, 1, plain, preset, str(tmp_path / "quantized"), timeout=240)
    assert main(["convert", str(tmp_path / "quantized"), str(tmp_path / "ours"), "--to", "modelopt"]) == 0
    model: Any = load_model(str(tmp_path / "quantized"))
    found, stored = plain_weights(tmp_path / "ours"), load_file(tmp_path / "ours" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    layer = model.layers["1"].mlp.down
    weight = layer.weight.detach()
    wanted = REFERENCES[preset](weight, layer.weight_quantizer.amax)
    torch.testing.assert_close(found[f"{name}.weight"].double(), wanted, rtol=1e-6, atol=0)
    assert (wanted - weight).abs().max() > 1e-3 * weight.abs().max()
    # four bits are two in a byte, and eight one
    narrow = "4" in preset
    assert stored[f"{name}.weight"].shape == (len(weight), weight.shape[1] // (1 + narrow))
    # ModelOpt's own tensors hold the same bytes
    tensors = modelopt("torch.quantization.qtensor")
    kind = getattr(tensors, f"{preset.removesuffix('_DEFAULT_CFG')}QTensor")
    sizes = {"MXFP8_DEFAULT_CFG": (), "MXFP4_DEFAULT_CFG": (32,)}.get(preset, (16,))
    packed, scale, *_ = kind.quantize(weight.clone(), *sizes)
    assert torch.equal(packed._quantized_data.view(torch.uint8), stored[f"{name}.weight"].view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8).flatten(), stored[f"{name}.weight_scale"].view(torch.uint8).flatten())


def test_fused_layers_share_the_second_scale(plain: str, tmp_path: Any) -> None:
    """Engines multiply queries, keys and values by one number."""
    run(calibrate, 1, plain, "NVFP4_DEFAULT_CFG", str(tmp_path / "quantized"), timeout=240)
    export_quantized(tmp_path / "quantized", tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    layer: Any = load_model(str(tmp_path / "quantized")).get_submodule("layers.0.attention.qkv")
    names = [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"]
    for leaf in ("weight_scale_2", "input_scale"):
        assert len({float(stored[f"{name}.{leaf}"]) for name in names}) == 1
    parts = [
        decode(*(stored[f"{name}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2"))) for name in names
    ]
    wanted = nvfp4(layer.weight.detach(), layer.weight_quantizer.amax)
    torch.testing.assert_close(torch.cat(parts).double(), wanted, rtol=1e-6, atol=0)


def test_a_format_without_files_is_refused(plain: str, tmp_path: Any) -> None:
    run(calibrate, 1, plain, "MXFP6_DEFAULT_CFG", str(tmp_path / "quantized"), timeout=240)
    with pytest.raises(ConfigurationError, match="ModelOpt has no files for the format of"):
        export_quantized(tmp_path / "quantized", tmp_path / "ours")


def test_a_cpu_does_not_compute_with_blocks(plain: str, tmp_path: Any) -> None:
    """It calibrates, loads and exports such models."""
    run(calibrate, 1, plain, "MXFP8_DEFAULT_CFG", str(tmp_path / "quantized"), timeout=240)
    model = load_model(str(tmp_path / "quantized"))
    with pytest.raises(ConfigurationError, match=r"a format to which ModelOpt rounds on CUDA alone.*device 'cpu'"):
        model(torch.arange(4))
    with pytest.raises(ConfigurationError, match="device 'meta'"):  # where the weights are now
        model.to("meta")(torch.arange(4, device="meta"))
    for preset in Quantizers("NVFP4_DEFAULT_CFG").read().values():
        with pytest.raises(ConfigurationError, match="on CUDA alone"):
            check_device(preset, torch.device("cpu"))


def test_rows_that_blocks_do_not_divide_are_refused() -> None:
    model = GPT(replace(BASE, hidden_size=24, num_heads=2))
    with pytest.raises(ConfigurationError, match="blocks of 16 features do not divide"):
        megalight.parallelize(model, megalight.Layout(transforms=(Quantizers("NVFP4_DEFAULT_CFG"),)))
