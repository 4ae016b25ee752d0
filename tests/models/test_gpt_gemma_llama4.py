"""Gemma-2, Gemma-3, Llama 4 of ``transformers`` in ours, beside what ``test_gpt_weights_matrix`` finds for each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalight.errors import ConfigurationError
from megalight.inference import Cache, load_model
from megalight.models.family import family
from megalight.models.gpt import GPT
from megalight.models.gpt.hugging_face import config_from_transformers
from megalight.models.gpt.presets import preset
from megalight.models.hugging_face.export import export
from megalight.models.loading import initial_config, whole_source
from megalight.models.stored import StoredModel, open_model
from megalight.nn.init import initialize
from megalight.types import PackedSequences
from tests.models.beside_transformers import ours_of
from tests.support.reference_gpt import relative_error

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}
GEMMA = {**SIZES, "sliding_window": 6, "query_pre_attn_scalar": 11, "pad_token_id": None}
LLAMA = {
    **SIZES,
    "intermediate_size": 12,
    "intermediate_size_mlp": 20,
    "num_local_experts": 4,
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.5,
    "pad_token_id": None,
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "scout": ("Llama4", {**LLAMA, "rope_parameters": SCALING}),
    "maverick": ("Llama4", {**LLAMA, "interleave_moe_layer_step": 2, "use_qk_norm": False}),
}


def theirs(name: str) -> Any:
    torch.manual_seed(1)
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**options)).double()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_generation_sees_what_training_sees(name: str) -> None:
    """Windows, chunks and temperatures are those of the whole sequence, token by token."""
    torch.manual_seed(1)
    model = GPT(config_from_transformers(theirs(name).config.to_dict())).double().eval()
    initialize(model, 3)
    tokens = torch.randint(0, 53, (17,))
    with torch.no_grad():
        wanted = model(tokens, PackedSequences.of_uniform(1, 17)).logits
        cache = Cache(model.layers, 1, 17)
        found = []
        for start, stop in ((0, 7), *((i, i + 1) for i in range(7, 17))):
            sequences = cache.extend([0], [stop - start], "cpu")
            found.append(model(tokens[start:stop], sequences, states=cache.states).logits)
    assert relative_error(torch.cat(found), wanted) < 1e-12


PREFIXED = {
    "scout": ("llama4", {"model.": "language_model.model.", "lm_head": "language_model.lm_head"}, "vision_model.a"),
    "gemma3": ("gemma3", {"model.": "model.language_model."}, "model.vision_tower.a"),
}


@pytest.mark.parametrize("name", PREFIXED)
def test_the_language_model_of_one_that_reads_images(name: str, tmp_path: Path) -> None:
    """Published folders hold it beside a tower for images, which is left out."""
    model = theirs(name)
    ours, files = ours_of(model, tmp_path)
    kind, prefixes, other = PREFIXED[name]
    renamed = {other: torch.zeros(2)}
    for key, tensor in files.items():
        start = next(old for old in prefixes if key.startswith(old))
        renamed[prefixes[start] + key.removeprefix(start)] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    text = {key: value for key, value in model.config.to_dict().items() if key != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    # As a GPTModule with these weights opens it: whole, a gemma3 folder is a model with its tower.
    known = family("gpt")
    config = initial_config(tmp_path, known)
    assert config == ours.config
    export(StoredModel(known, config, whole_source(tmp_path, known, config), {}), tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == files.keys()
    assert all(torch.equal(back[key], files[key]) for key in back)
    assert load_model(tmp_path / "out").config == ours.config


PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2_27b": {
        "model_type": "gemma2",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_hidden_layers": 46,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 144,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
    },
    "gemma3_1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
    },
    "gemma3_4b": {  # that is all it says
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "llama4_scout": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "vocab_size": 202048,
        "max_position_embeddings": 10485760,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": 4,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [],
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_configurations(name: str) -> None:
    found, expected = config_from_transformers(PUBLISHED[name]), preset(name)
    if expected.moe is not None and found.moe is not None:
        found = replace(found, moe=replace(found.moe, balance=expected.moe.balance))
    pattern = tuple(found.attention.windowed[i % len(found.attention.windowed)] for i in range(found.num_layers))
    wanted = tuple(expected.attention.windowed[i % len(expected.attention.windowed)] for i in range(found.num_layers))
    assert pattern == wanted
    assert (
        replace(found, attention=replace(found.attention, window_pattern=expected.attention.window_pattern)) == expected
    )


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("gemma2_27b", "use_bidirectional_attention", True, "use_bidirectional_attention is True; only False"),
        ("gemma3_1b", "hidden_activation", "relu", "hidden_activation is 'relu'; only 'gelu_pytorch_tanh'"),
        ("gemma3_1b", "attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50.0; only None"),
        (
            "gemma3_1b",
            "rope_parameters",
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters.sliding_attention has rope_type 'linear'; only 'default'",
        ),
        ("llama4_scout", "attention_bias", True, "attention_bias is True; only False"),
    ],
)
def test_options_without_counterpart(name: str, option: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers({**PUBLISHED[name], option: value})


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3"])
def test_models_without_windows_are_written(kind: str, tmp_path: Path) -> None:
    """Theirs make a mask with a window all the same, so the file must say one."""
    config = getattr(transformers, "Gemma2Config" if kind == "Gemma2" else "Gemma3TextConfig")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**{**GEMMA, "layer_types": ["full_attention"] * 4}))
    model.save_pretrained(tmp_path / "theirs")
    export(open_model(tmp_path / "theirs"), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = torch.randint(0, 53, (2, 17))
    assert torch.equal(again(tokens).logits, model(tokens).logits)
