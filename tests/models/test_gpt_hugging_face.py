"""Weights of ``transformers`` models in ours: equal logits and gradients, and the way back."""

import dataclasses
import json

import pytest
import torch

from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.hugging_face import (
    config_from_transformers,
    config_to_transformers,
    from_transformers,
    to_transformers,
)
from megalight.models.gpt.presets import preset
from megalight.nn.canonical import canonical_tensors
from megalight.ops.rotary import RotaryScaling
from megalight.types import PackedSequences
from tests.support.canonical import load_canonical
from tests.support.reference_gpt import canonical_gradients, relative_error

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
}
MODELS = {
    "llama": ("Llama", {**SIZES}),
    "llama_tied_scaled": ("Llama", {**SIZES, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama_biased": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "ministral": (
        "Ministral",
        {**SIZES, "head_dim": 4, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2": ("Qwen2", {**SIZES}),
    "qwen2_windowed": (
        "Qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}),
    "qwen3_yarn": ("Qwen3", {**SIZES, "head_dim": 8, "rope_parameters": YARN}),
    "smollm3": ("SmolLM3", {**SIZES, "num_hidden_layers": 3, "no_rope_layer_interval": 2, "pad_token_id": None}),
    "gpt2": (
        "GPT2",
        {"vocab_size": 53, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "initializer_range": 0.2}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
}
# their rotary tables are float32 whatever the model's type
TOLERANCE = {"gpt2": 1e-11}


def theirs(name: str):
    family, options = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**options, attn_implementation="eager")
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_equal_logits_and_gradients(name):
    model = theirs(name)
    config = config_from_transformers(model.config.to_dict())
    assert config == GPTConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    ours = GPT(config).double()
    load_canonical(ours, from_transformers(model.state_dict(), config))

    tokens = torch.randint(0, 53, (3, 17))
    cotangent = torch.randn(3, 17, 53, dtype=torch.float64)
    expected = model(tokens).logits
    (expected * cotangent).sum().backward()
    logits = ours(tokens.flatten(), PackedSequences.of_uniform(3, 17)).logits.view_as(expected)
    (logits * cotangent).sum().backward()
    tolerance = TOLERANCE.get(name, 2e-6)
    assert relative_error(logits, expected) < tolerance

    expected_gradients = from_transformers(
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, config
    )
    gradients = canonical_gradients(ours)
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in gradients.items():
        if name != "gpt2" or not key.endswith("k.bias"):  # which softmax does not feel: rounding noise around 0
            assert relative_error(gradient, expected_gradients[key]) < tolerance, key


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name):
    model = theirs(name)
    config = config_from_transformers(model.config.to_dict())
    ours = GPT(config).double()
    load_canonical(ours, from_transformers(model.state_dict(), config))
    back = to_transformers(canonical_tensors(ours), config)
    expected = dict(model.named_parameters())  # names a tied head once
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[key], expected[key]) for key in back)


def test_presets_are_the_published_configurations():
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": None},
        "tie_word_embeddings": False,
    }
    assert config_from_transformers(llama) == preset("llama3_8b")
    gpt2 = {**transformers.GPT2Config().to_dict(), "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    assert config_from_transformers(gpt2) == preset("gpt2_small")


def test_foreign_things_are_refused():
    config = preset("gpt2_small")
    with pytest.raises(CheckpointError, match=r"model\.vision\.weight has no counterpart"):
        from_transformers({"model.vision.weight": torch.zeros(1)}, config)
    half = {"layers.0.attention.q.bias": torch.zeros(768), "layers.0.attention.v.bias": torch.zeros(768)}
    with pytest.raises(CheckpointError, match=r"h\.0\.attn\.c_attn\.bias is made of parts, and .*\.k\.bias is missing"):
        to_transformers(half, config)
    two = {"layers.0.attention.q.bias": torch.zeros(768), "layers.0.attention.k.bias": torch.zeros(768)}
    with pytest.raises(CheckpointError, match=r"h\.0\.attn\.c_attn\.bias is made of parts, and .*\.v\.bias is missing"):
        to_transformers(two, config)
    wide = {f"layers.0.attention.{name}.bias": torch.zeros(770) for name in "qkv"}
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.q\.bias has 770 rows; its place in .* has 768"):
        to_transformers(wide, config)
    with pytest.raises(ConfigurationError, match="model_type is 'bert'"):
        config_from_transformers({"model_type": "bert"})
    rotary = {"rope_type": "longrope", "factor": 4.0}
    with pytest.raises(ConfigurationError, match="rope_type 'longrope'"):
        config_from_transformers({**theirs("llama").config.to_dict(), "rope_parameters": rotary})
    rotary = {"rope_type": "linear", "rope_theta": 100.0, "factor": 0.5}
    with pytest.raises(ConfigurationError, match=r"rotary scaling factor is 0.5; it must be at least 1"):
        config_from_transformers({**theirs("llama").config.to_dict(), "rope_parameters": rotary})
    with pytest.raises(ConfigurationError, match=r"attention_factor is 2.0, and the other values of yarn give 1.138"):
        config_from_transformers(
            {**theirs("llama").config.to_dict(), "rope_parameters": {**YARN, "attention_factor": 2.0}}
        )


@pytest.mark.parametrize("name", ["llama_tied_scaled", "qwen3_yarn", "smollm3"])
def test_configuration_round_trip(name):
    ours = config_from_transformers(theirs(name).config.to_dict())
    values = config_to_transformers(ours)
    assert config_from_transformers(values) == ours
    position = dataclasses.replace(ours.position, scaling=RotaryScaling("ntk", 2.0))
    unknown = dataclasses.replace(ours, position=position)
    with pytest.raises(ConfigurationError, match=r"Nearest: rope_type 'ntk'"):
        config_to_transformers(unknown)
