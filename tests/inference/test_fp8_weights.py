"""Models whose weights are stored in FP8: published so, or quantized when they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalight.errors import CheckpointError, ConfigurationError
from megalight.inference import DynamicEngine
from megalight.inference.fp8_weights import quantize_loaded, quantize_weights
from megalight.inference.text import load_model
from megalight.models.gpt import GPT
from megalight.models.hf_causal_lm import HFModel
from megalight.nn.linear import Linear
from megalight.ops.quantized_weight import stored_of
from tests.inference.test_engine import alone, ask, tokens_of
from tests.inference.test_generate import build
from tests.models.test_gpt_hugging_face import theirs

pytest.importorskip("transformers")

FORMS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "deepseek": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [6, 8]},
        "_scale_inv",
        lambda out, size: torch.rand(-(-out // 6), -(-size // 8)),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", lambda out, size: torch.rand(())),
    "rows": ({"quant_method": "modelopt"}, "_scale", lambda out, size: torch.rand(out)),
    "old": ({}, "_scale", lambda out, size: torch.rand(1)),
    "squares": (
        {"quant_method": "modelopt", "weight_block_size": [8, 8]},
        "_scale",
        lambda out, size: torch.rand(out // 8, 1, size // 8, 1),
    ),
}
"""Description in ``config.json``, suffix of scales, and their form."""


def published(kind: str, folder: Path) -> dict[str, Tensor]:
    """Write a model in FP8; return its matrices, widened in float32."""
    described, suffix, form = FORMS[kind]
    theirs("llama").float().save_pretrained(folder)
    tensors, wide = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in [*tensors.items()]:
        if "_proj.weight" in name:
            scales = form(*tensor.shape) / 16 + 0.01
            tensors[name] = (tensor * 20).to(torch.float8_e4m3fn)
            tensors[name + suffix] = scales
            if suffix == "_scale":
                tensors[name.removesuffix("weight") + "input_scale"] = torch.rand(())
            rows, columns = tensor.shape
            flat = scales.flatten(1) if scales.ndim == 4 else scales.view(-1, 1) if scales.ndim < 2 else scales
            height, width = described.get("weight_block_size", (rows // flat.shape[0], columns // flat.shape[1]))
            spread = flat.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
            wide[name] = tensors[name].float() * spread
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if described:
        config["quantization_config"] = described
    else:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    (folder / "config.json").write_text(json.dumps(config))
    return wide


@pytest.mark.parametrize("kind", FORMS)
def test_published_weights_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    wide = published(kind, tmp_path)
    kept, widened = (load_model(tmp_path, quantization=each) for each in ("auto", "none"))
    assert isinstance(kept, GPT)
    layer: Any = kept.layers["0"]
    names = {"attention.qkv": ("q", "k", "v"), "attention.proj": ("o",), "mlp.gate_up": ("gate", "up")}
    for path, parts in names.items():
        around = "model.layers.0." + ("self_attn" if "attention" in path else "mlp")
        codes = stored_of(layer.get_submodule(path).weight)
        assert codes is not None
        exact = torch.cat([wide[f"{around}.{part}_proj.weight"] for part in parts])
        assert torch.equal(codes.values(torch.float32), exact)
        assert codes.data.nbytes == exact.numel()
    engines = [DynamicEngine(model, num_blocks=40, block_size=3) for model in (kept, widened)]
    for engine in engines:
        ask(engine)
    assert tokens_of(engines[0].run()) == tokens_of(engines[1].run())


def test_any_weights_are_quantized_and_leave_the_device_with_others() -> None:
    model, exact = build(), build()
    quantize_weights(model)
    layers = [each for each in model.layers.modules() if isinstance(each, Linear)]
    assert all(stored_of(each.weight) is not None for each in layers)
    for own, other in zip(model.layers.modules(), exact.layers.modules(), strict=True):
        if isinstance(own, Linear) and isinstance(other, Linear):
            codes = stored_of(own.weight)
            assert codes is not None
            assert float((codes.values() - other.weight.data).norm() / other.weight.data.norm()) < 0.04
            other.weight.data = codes.values()
    expected = alone(exact)
    assert expected != alone(build()), "quantization changes nothing"
    engine = DynamicEngine(model, num_blocks=40, block_size=3)
    ask(engine)
    engine.step()
    engine.suspend(weights=True)
    codes = stored_of(layers[0].weight)
    assert codes is not None
    assert codes.data.untyped_storage().nbytes() == 0
    engine.resume()
    assert tokens_of(engine.run()) == expected


def test_models_with_code_of_transformers_are_widened_or_refused(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(root=HFModel.of(theirs("llama")))
    quantize_loaded(model, tmp_path, "auto", False)  # nothing is read
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM is a model of transformers with its own code"):
        quantize_loaded(model, tmp_path, "fp8", False)


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="quantization is 'fp4'; it must be auto, fp8, none"):
        load_model(tmp_path, quantization="fp4")
    published("modelopt", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the scales of model.layers.0.mlp.up_proj.weight .* float32 \[3\]"):
        load_model(tmp_path)
