"""GPT-OSS of ``transformers`` in ours: equal logits and gradients, and the way back."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalight.checkpoint import boxes
from megalight.checkpoint.foreign.transformers_folder import read_config
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.gpt import GPT, GPTConfig, GPTModule
from megalight.models.gpt.hugging_face import (
    config_from_transformers,
    config_to_transformers,
    from_transformers,
    to_transformers,
    weight_map,
)
from megalight.models.gpt.presets import preset
from megalight.models.hugging_face.export import export
from megalight.models.hugging_face.folder import Folder
from megalight.models.stored import open_model
from megalight.parallel.apply import parallelize
from megalight.parallel.initial_values import materialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model_plans import plan_for
from megalight.parallel.source import Target, parameter_targets
from megalight.types import PackedSequences
from tests.support.canonical import load_canonical
from tests.support.reference_gpt import canonical_gradients, relative_error

transformers = pytest.importorskip("transformers")
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

LENGTH = 41
"""More than two windows."""


def theirs() -> Any:
    torch.manual_seed(1)
    rotary = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False, "beta_fast": 32.0}
    config = transformers.GptOssConfig(
        num_hidden_layers=4,
        num_local_experts=6,
        num_experts_per_tok=4,
        vocab_size=53,
        hidden_size=24,
        intermediate_size=20,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        initializer_range=0.3,
        rope_parameters={**rotary, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = transformers.GptOssForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 2 and parameter.shape[-1] != 24:
                parameter.add_(0.5 * torch.randn_like(parameter))
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(8)  # so that some activations reach their limit
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt_oss")
    theirs().float().save_pretrained(path)
    return path


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found


def test_equal_logits_and_gradients() -> None:
    model = theirs()
    config = config_from_transformers(model.config.to_dict())
    ours = GPT(config).double()
    load_canonical(ours, from_transformers(model.state_dict(), config))
    tokens = torch.randint(0, 53, (2, LENGTH))
    expected = model(tokens).logits
    found = ours(tokens.flatten(), PackedSequences.of_uniform(2, LENGTH)).logits.view_as(expected)
    assert relative_error(found, expected) < 2e-6
    cotangent = torch.randn_like(expected)
    for logits in (found, expected):
        (logits * cotangent).sum().backward()
    wanted = from_transformers({name: p.grad for name, p in model.named_parameters()}, config)
    gradients = canonical_gradients(ours)
    assert gradients.keys() == wanted.keys()
    for key, gradient in gradients.items():
        # their rotary tables are float32, and the wide activations amplify that
        if not key.endswith("attention.k.bias") or wanted[key].norm() > 1e-9:
            assert relative_error(gradient, wanted[key]) < 2e-4, key


def test_experts_are_stacked_and_gate_and_up_take_turns(folder: Path) -> None:
    """Written out, without the table."""
    files = tensors_in(folder)
    ours = from_transformers(files, config_from_transformers(read_config(folder)))
    source = "model.layers.3.mlp.experts"
    for expert in range(6):
        for place, name in enumerate(("gate", "up")):
            found = [ours[f"layers.3.mlp.experts.{expert}.{name}.{leaf}"] for leaf in ("weight", "bias")]
            assert torch.equal(found[0], files[f"{source}.gate_up_proj"][expert, :, place::2].T)
            assert torch.equal(found[1], files[f"{source}.gate_up_proj_bias"][expert, place::2])
        assert torch.equal(ours[f"layers.3.mlp.experts.{expert}.down.weight"], files[f"{source}.down_proj"][expert].T)
        assert torch.equal(ours[f"layers.3.mlp.experts.{expert}.down.bias"], files[f"{source}.down_proj_bias"][expert])
    assert torch.equal(ours["layers.3.attention.sink.offset"], files["model.layers.3.self_attn.sinks"])


def test_round_trip(folder: Path) -> None:
    files, config = tensors_in(folder), config_from_transformers(read_config(folder))
    assert config == GPTConfig.from_dict(config.to_dict())
    ours = from_transformers(files, config)
    back = to_transformers(ours, config)
    assert back.keys() == files.keys()
    assert all(torch.equal(tensor, files[key]) for key, tensor in back.items())
    values = config_to_transformers(config)
    again = transformers.GptOssConfig(**copy.deepcopy(values))
    assert config_to_transformers(config_from_transformers(again.to_dict())) == values
    del ours["layers.1.mlp.experts.4.up.bias"]
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj_bias is made of parts, and .*experts\.4\.up\.bias is missing"
    ):
        to_transformers(ours, config)
    with pytest.raises(CheckpointError, match=r"experts\.6\.up\.bias has no counterpart: .*gate_up_proj_bias stacks 6"):
        to_transformers({"layers.1.mlp.experts.6.up.bias": torch.zeros(20)}, config)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"ep": 2}])
def test_a_rank_reads_what_it_holds(layout: dict[str, int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gate and up, which take turns, each read takes the other along."""
    monkeypatch.setattr(boxes, "GAP", 1)
    config = config_from_transformers(read_config(folder))
    expected = from_transformers(tensors_in(folder), config)
    source = Folder(folder, weight_map(config), "model.")
    names, ranks = set(), 2 if layout else 1
    for rank in range(ranks):
        with torch.device("meta"):
            model = GPTModule(config).build_model()
        mesh, sequence_parallel = ParallelMesh(ranks, rank, **layout), "tp" in layout
        specs = parallelize(model, plan_for(model), mesh, sequence_parallel=sequence_parallel, prefix="model.")
        materialize(model, "cpu")
        targets = list(parameter_targets(model.named_parameters(), specs))
        before = source.bytes_read
        source.fill(targets, prefix="model.", strict="ep" not in layout)
        for target in targets:
            box = tuple(slice(o, o + n) for o, n in zip(target.offset, target.data.shape, strict=True))
            assert torch.equal(target.data, expected[target.name.removeprefix("model.")][box]), target.name
        names |= {target.name for target in targets}
        twice = sum(t.data.nbytes for t in targets if t.name.rsplit(".", 2)[1] in ("gate", "up"))
        assert source.bytes_read - before == sum(target.data.nbytes for target in targets) + twice
    assert names == source.tensors.keys()


def test_any_box_is_filled_in_any_type(folder: Path) -> None:
    config = config_from_transformers(read_config(folder))
    expected, source = from_transformers(tensors_in(folder), config), Folder(folder, weight_map(config), "")
    for leaf in ("gate.weight", "up.weight", "up.bias", "gate.bias", "down.weight", "down.bias"):
        tensor = expected[name := f"layers.2.mlp.experts.5.{leaf}"]
        box = tuple(slice(3, 3 + n) for n in (7, 9)[: tensor.ndim])
        data = torch.zeros_like(tensor[box], dtype=torch.float64)
        source.fill([Target(name, tuple(tensor.shape), (3,) * tensor.ndim, data)], strict=False)
        assert torch.equal(data, tensor[box].double())


PACKED = ("gate_up_proj", "down_proj")


def test_published_folders_are_in_mxfp4(tmp_path: Path) -> None:
    """They are read like the folder of the weights that ``transformers`` widens them to, and written as that."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_hidden_layers": 2}
    config = transformers.GptOssConfig(
        **sizes, vocab_size=53, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path / "wide")
    wide = tensors_in(tmp_path / "wide")
    packed = {name: tensor for name, tensor in wide.items() if not name.endswith(PACKED)}
    for name in wide.keys() - packed.keys():
        experts, columns, rows = wide[name].shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, (experts, rows, columns // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert wide[name].shape == (experts, columns, rows)
    (tmp_path / "packed").mkdir()
    save_file(packed, tmp_path / "packed" / "model.safetensors")
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    values = {**read_config(tmp_path / "wide"), "quantization_config": quantized}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(values))
    export(open_model(tmp_path / "packed"), tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    assert found.keys() == wide.keys()
    assert all(torch.equal(tensor, wide[name]) for name, tensor in found.items())
    assert "quantization_config" not in read_config(tmp_path / "out")


def test_another_number_of_experts_is_refused(folder: Path) -> None:
    config = config_from_transformers({**read_config(folder), "num_local_experts": 5})
    with pytest.raises(CheckpointError, match=r"has 6 stacked tensors; the configuration asks for 5"):
        Folder(folder, weight_map(config), "model.")
    config = config_from_transformers({**read_config(folder), "intermediate_size": 18})
    with pytest.raises(CheckpointError, match=r"gate_up_proj.* has 40 output features; the configuration asks for 36"):
        Folder(folder, weight_map(config), "model.")


PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt_oss_20b", 24, 32), ("gpt_oss_120b", 36, 128)])
def test_presets_are_the_published_configurations(name: str, layers: int, experts: int) -> None:
    values: dict[str, Any] = {**PUBLISHED, "num_hidden_layers": layers, "num_local_experts": experts}
    config = config_from_transformers(values)  # without layer_types: every other layer has a window
    unsaid = ("attention_bias", "hidden_act", "head_dim", "sliding_window", "rope_theta", "rope_scaling")
    assert config_from_transformers({key: value for key, value in values.items() if key not in unsaid}) == config
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    assert config_from_transformers({**values, "layer_types": kinds}) == config
    pattern = config.attention.windowed
    assert pattern == (True, False) * (layers // 2)
    attention = replace(config.attention, window_pattern=pattern[:2])
    assert replace(config, attention=attention) == preset(name)
    assert config_to_transformers(preset(name)).items() >= config_to_transformers(config).items()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("swiglu_limit", 5.0, "swiglu_limit is 5.0; only 7.0 has a counterpart"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; only 'silu'"),
    ],
)
def test_options_without_counterpart(option: str, value: Any, message: str, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers({**read_config(folder), option: value})
