"""Quantized checkpoints in ModelOpt's format: the same files as ModelOpt writes of the model of transformers."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from megalight.callbacks import ModelOptQuantization
from megalight.cli.main import main
from megalight.errors import CheckpointError
from megalight.inference import load_model
from megalight.models.gpt.module import GPTModule
from megalight.models.stored import open_model
from megalight.plugins.modelopt.export import export_quantized, plain_weights
from megalight.plugins.modelopt.presets import modelopt
from megalight.strategies import MegatronStrategy
from megalight.types import TokenBatch
from tests.plugins.modelopt_schema import check_folder
from tests.support.environment import trainer
from tests.support.workers import run

pytest.importorskip("modelopt")
transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "architectures": ["LlamaForCausalLM"],
}
NAMES = {
    # squares of 128 x 128 divide its rows
    "square": ("Qwen3ForCausalLM", "Qwen3Config"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig"),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config"),
    "kimi_k2": ("DeepseekV3ForCausalLM", "DeepseekV3Config"),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig"),
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "llama4": {
        **{"num_local_experts": 4, "intermediate_size": 64, "intermediate_size_mlp": 256, "head_dim": 32},
        **{
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 8,
            "num_experts_per_tok": 1,
        },
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "deepseek": {
        **{"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64},
        **{"first_k_dense_replace": 1, "num_mtp_layers": 0, "q_lora_rank": 32, "kv_lora_rank": 32, "head_dim": 8},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4},
    },
}
EXPERTS["kimi_k2"] = EXPERTS["deepseek"] | {
    **{"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3, "routed_scaling_factor": 2.827},
    **{"rope_theta": 50000.0, "rope_interleave": True, "q_lora_rank": 48},
}
"""More experts than DeepSeek-V3, and no groups of them."""
LATENT = ("deepseek", "kimi_k2")
CALIBRATION = 2
KV = "FP8_KV_CFG"


def rows() -> list[torch.Tensor]:
    return [torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(step)) for step in range(CALIBRATION)]


def theirs(kind: str) -> Any:
    names = NAMES[kind]
    model, config = (getattr(transformers, name) for name in names)
    torch.manual_seed(0)
    more: dict[str, Any] = {} if kind == "llama" else {"head_dim": 128 if kind == "square" else 32}
    if kind in EXPERTS:
        more |= {"num_experts_per_tok": 2, "output_router_logits": False} | EXPERTS[kind]
    return model(config(**{**SIZES, **more, "architectures": [names[0]]})).float()


def calibrate(folder: str, preset: str, output: str, kv: str | None = None) -> None:
    batches = [TokenBatch(row[:, :-1], row[:, 1:], torch.ones(2, 16)) for row in rows()]
    runner = trainer(
        MegatronStrategy(),
        callbacks=[ModelOptQuantization(preset, kv=kv, save_to=output)],
        use_distributed_sampler=False,
        precision="32-true",
    )
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    # Calibration rounds nothing, so a CPU can calibrate what only CUDA rounds to.
    with patch("megalight.callbacks.modelopt.check_device"):
        runner.validate(GPTModule(weights=folder), loader, verbose=False)


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("llama", "FP8_DEFAULT_CFG"),
        ("qwen3", "INT4_AWQ_CFG"),
        ("llama", "W4A8_AWQ_BETA_CFG"),
        ("llama", "NVFP4_DEFAULT_CFG"),
        pytest.param("llama", "W4A8_NVFP4_FP8_CFG", marks=pytest.mark.full),
        pytest.param("llama", "MXFP8_DEFAULT_CFG", marks=pytest.mark.full),
        ("llama", "MXFP4_DEFAULT_CFG"),
        ("square", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
        ("qwen3_moe", "NVFP4_DEFAULT_CFG"),
        pytest.param("qwen3_moe", "FP8_DEFAULT_CFG", marks=pytest.mark.full),
        ("deepseek", "FP8_DEFAULT_CFG"),
        pytest.param("kimi_k2", "NVFP4_DEFAULT_CFG", marks=pytest.mark.full),
        pytest.param("kimi_k2", "FP8_DEFAULT_CFG", marks=pytest.mark.full),
        ("llama4", "FP8_DEFAULT_CFG"),
        pytest.param("mixtral", "INT8_DEFAULT_CFG", marks=pytest.mark.full),
        pytest.param("qwen3", "FP8_PER_CHANNEL_PER_TOKEN_CFG", marks=pytest.mark.full),
        pytest.param("llama", "INT8_SMOOTHQUANT_CFG", marks=pytest.mark.full),
    ],
)
def test_files_are_those_of_modelopt(kind: str, preset: str, tmp_path: Path) -> None:
    model = theirs(kind)
    model.save_pretrained(tmp_path / "plain")
    if kind == "kimi_k2":
        # As published; transformers has no class of this name.
        path = tmp_path / "plain" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": kind}))
    # Latent attention stores no keys and values, and ModelOpt calibrates none with these presets.
    kv = None if kind in LATENT or "MX" in preset else KV
    run(calibrate, 1, str(tmp_path / "plain"), preset, str(tmp_path / "quantized"), kv, timeout=240)
    assert main(["convert", str(tmp_path / "quantized"), str(tmp_path / "ours"), "--to", "modelopt"]) == 0
    mtq, export = modelopt(), modelopt("torch.export")
    config = copy.deepcopy(getattr(mtq, preset))
    config["quant_cfg"] += copy.deepcopy(getattr(mtq, kv)["quant_cfg"]) if kv else []

    def loop(root: Any) -> None:
        with torch.no_grad():
            for row in rows():
                root(row[:, :-1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mtq.quantize(model, config, loop)
        export.export_hf_checkpoint(model, dtype=torch.float32, export_dir=str(tmp_path / "theirs"))
    ours, wanted = (json.loads((tmp_path / who / "hf_quant_config.json").read_text()) for who in ("ours", "theirs"))
    assert ours == wanted
    ours, wanted = (json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs"))
    assert ours["quantization_config"] == wanted["quantization_config"]
    assert kv is None or wanted["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    check_folder(tmp_path / "ours", tmp_path / "plain")
    before, decoded = load_file(tmp_path / "plain" / "model.safetensors"), plain_weights(tmp_path / "ours")
    for name, value in decoded.items():
        assert float((value - before[name]).norm()) <= 0.15 * float(before[name].norm()), name
    assert decoded.keys() == before.keys()
    compare(preset, kv, *(load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs")))


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are one of ours: they have one scale of inputs, or of weights, where ModelOpt's have each their own."""


def compare(preset: str, kv: str | None, ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    cache = {name for name in wanted if name.endswith(("k_scale", "v_scale"))}
    assert len(cache) == (2 * SIZES["num_hidden_layers"] if kv else 0)
    for name in cache:
        torch.testing.assert_close(ours[name], wanted[name], rtol=1e-5, atol=0, msg=name)
    alike, awq = {name for group in FUSED for name in group}, "AWQ" in preset
    if awq:
        # ModelOpt's exporter averages the scales of such layers, and multiplies the norm before them by the mean.
        ours, wanted = ({n: t for n, t in each.items() if n.split(".")[-2] not in alike} for each in (ours, wanted))
        norms = {name for name in wanted if "layernorm" in name}
        ours, wanted = ({n: t for n, t in each.items() if n not in norms} for each in (ours, wanted))
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in wanted.items()}
    for name, value in wanted.items():
        around, _, rest = name.rpartition(".")
        group = next((group for group in FUSED if around.rpartition(".")[2] in group), None)
        if preset == "FP8_DEFAULT_CFG" and group is not None:
            if rest == "weight_scale":
                beside = [wanted[f"{around.rpartition('.')[0]}.{each}.weight_scale"] for each in group]
                value = torch.stack(beside).amax()
            if rest == "weight":
                for quantized in (ours, wanted):
                    quantized[name] = quantized[name].float() * quantized[f"{around}.weight_scale"]
                torch.testing.assert_close(ours[name], wanted[name], rtol=0.13, atol=2e-4, msg=name)
                continue
        # The products of the passes before differ in their last bits, and a code may be the next one.
        if value.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
            assert float((ours[name].float() != value.float()).float().mean()) < 0.02, name
        else:
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


def mix(folder: str, output: str) -> None:
    batches = [TokenBatch(row[:, :-1], row[:, 1:], torch.ones(2, 16)) for row in rows()]
    layers = {
        "layers.*.mlp.down": "INT8_DEFAULT_CFG",
        "layers.0.attention.*": "none",
        "layers.1.mlp.gate_up": "INT4_AWQ_CFG",
    }
    runner = trainer(
        MegatronStrategy(),
        callbacks=[ModelOptQuantization(save_to=output, layers=layers)],
        use_distributed_sampler=False,
        precision="32-true",
    )
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    runner.validate(GPTModule(weights=folder), loader, verbose=False)


def test_layers_of_a_folder_have_their_own_formats(tmp_path: Path) -> None:
    theirs("llama").save_pretrained(tmp_path / "plain")
    run(mix, 1, str(tmp_path / "plain"), str(tmp_path / "quantized"), timeout=240)
    assert export_quantized(tmp_path / "quantized", tmp_path / "ours") == 10
    check_folder(tmp_path / "ours", tmp_path / "plain")
    found = json.loads((tmp_path / "ours" / "hf_quant_config.json").read_text())["quantization"]
    assert found["quant_algo"] == "MIXED_PRECISION"
    formats = {name: each["quant_algo"] for name, each in found["quantized_layers"].items()}
    assert formats["model.layers.1.self_attn.q_proj"] == "FP8"
    assert formats["model.layers.0.mlp.down_proj"] == "W8A8_SQ_PER_CHANNEL"
    assert formats["model.layers.1.mlp.up_proj"] == "W4A16_AWQ"
    assert not any("layers.0.self_attn" in name for name in formats)


@pytest.mark.parametrize("preset", ["INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG"])
def test_packed_quantized_values_are_the_rounded_weights(preset: str, tmp_path: Path) -> None:
    """Quantized values and scales, multiplied out, are the weights that the model computes with."""
    theirs("llama").save_pretrained(tmp_path / "plain")
    run(calibrate, 1, str(tmp_path / "plain"), preset, str(tmp_path / "quantized"), timeout=240)
    assert export_quantized(tmp_path / "quantized", tmp_path / "ours") == 14
    tensors, model = plain_weights(tmp_path / "ours"), load_model(str(tmp_path / "quantized"))
    layer: Any = model.get_submodule("layers.1.attention.qkv")
    exact = layer.weight_quantizer(layer.weight).detach()
    scale = getattr(layer.input_quantizer, "_pre_quant_scale", None)
    if scale is not None:
        exact = exact * scale.squeeze()
    found = torch.cat([tensors[f"model.layers.1.self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")])
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


def test_refusals(tmp_path: Path) -> None:
    theirs("llama").save_pretrained(tmp_path / "plain")
    run(calibrate, 1, str(tmp_path / "plain"), "FP8_DEFAULT_CFG", str(tmp_path / "quantized"), timeout=240)
    with pytest.raises(CheckpointError, match=r"is quantized.*--to modelopt"):
        open_model(tmp_path / "quantized")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "c")]) == 0
    with pytest.raises(CheckpointError, match="is not quantized; calibrate it first"):
        export_quantized(tmp_path / "c", tmp_path / "out")
