"""A ``config.json`` may leave values out. What ``transformers`` takes in their place is taken here, or refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.errors import CheckpointError, ConfigurationError, MegalightError
from megalight.models.family import Family, families
from megalight.models.gpt.hugging_face import config_from_transformers, config_to_transformers, settings
from megalight.models.hugging_face.export import export
from megalight.models.hugging_face.model_types import NULLABLE, TYPES
from megalight.models.loading import transformers_model
from megalight.models.stored import open_model
from megalight.types import PackedSequences
from tests.support.reference_gpt import relative_error

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    # a multiple of every number of key heads that theirs take by themselves
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 100.0,
    "attention_dropout": 0.1,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
TURNS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
FILES: list[dict[str, Any]] = [
    {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", **SIZES, "sliding_window": 6},
    {"model_type": "ministral", **SIZES, "sliding_window": 6, "layer_types": TURNS},
    {"model_type": "mixtral", **SIZES, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen2", **SIZES, **WINDOW},
    {"model_type": "qwen2", **SIZES, "sliding_window": 6, "max_window_layers": 2, "layer_types": TURNS},
    {"model_type": "qwen3", **SIZES, **WINDOW, "layer_types": TURNS},
    {"model_type": "qwen3_moe", **SIZES, **WINDOW, **EXPERTS, "mlp_only_layers": [1]},
    {"model_type": "olmoe", **SIZES, **EXPERTS, "norm_topk_prob": True},
    {"model_type": "smollm3", **SIZES, "no_rope_layers": [1, 1, 0, 1, 0]},
    {"model_type": "smollm3", **SIZES, "use_sliding_window": True, "sliding_window": 6, "no_rope_layer_interval": 2},
    {
        "model_type": "gpt_oss",
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "layer_types": TURNS},
        **{"swiglu_limit": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    },
    {
        "model_type": "gemma2",
        **SIZES,
        **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 24},
        **{"sliding_window": 6, "layer_types": TURNS},
    },
    {"model_type": "gemma3_text", **SIZES, "query_pre_attn_scalar": 24, "sliding_window": 6, "layer_types": TURNS},
    {
        "model_type": "llama4_text",
        **SIZES,
        **{"intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1},
        **{"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 5, "floor_scale": 4},
    },
    {
        "model_type": "gpt2",
        **{"vocab_size": 53, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "layer_norm_epsilon": 1e-4},
        **{"activation_function": "relu", "resid_pdrop": 0.2, "embd_pdrop": 0.3, "attn_pdrop": 0.4},
    },
]


def meaning(values: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return settings(config_from_transformers(values))
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file["model_type"])
def test_what_a_file_leaves_out(file: dict[str, Any]) -> None:
    kind = type(transformers.AutoConfig.for_model(file["model_type"]))
    assert isinstance(meaning(file), dict)
    for left_out in [None, *sorted(file.keys() - {"model_type"})]:
        values = {name: value for name, value in file.items() if name != left_out}
        found = meaning(values)
        if not (isinstance(found, str) and "lacks" in found):
            assert found == meaning(kind.from_dict(values).to_dict()), f"without {left_out}"


def test_a_null_scaling_of_gpt_oss_is_its_default() -> None:
    file = next(file for file in FILES if file["model_type"] == "gpt_oss")
    scaling = config_from_transformers({**file, "rope_scaling": None}).position.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("yarn", 32.0)


def test_gpt_oss_without_a_scaling() -> None:
    """It is read, and what is written says that there is none: without the key it would be theirs by default."""
    file = next(file for file in FILES if file["model_type"] == "gpt_oss")
    config = config_from_transformers({**file, "rope_scaling": {"rope_type": "default"}})
    assert config.position.scaling is None
    written = config_to_transformers(config)
    theirs = transformers.GptOssConfig(**{key: value for key, value in written.items() if key != "model_type"})
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 100.0}
    assert meaning(written) == meaning(theirs.to_dict()) == settings(config)


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "truncate": False},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_what_a_scaling_leaves_out(kind: str, scaling: dict[str, Any]) -> None:
    """``transformers`` takes the length of the model for the original one, or one beside the scaling."""
    for key in ("rope_scaling", "rope_parameters"):
        for beside in ({}, {"original_max_position_embeddings": 32}):
            values = {"model_type": kind, **SIZES, key: dict(scaling), **beside}
            expected = type(transformers.AutoConfig.for_model(kind)).from_dict(copy.deepcopy(values)).to_dict()
            assert isinstance(meaning(values), dict)
            assert meaning(values) == meaning(expected), values


@pytest.mark.parametrize(
    ("kind", "types", "message"),
    [
        ("llama", TURNS, "layer_types has full_attention, sliding_attention and sliding_window is None; layers of lla"),
        ("mixtral", TURNS, "layer_types has full_attention, sliding_attention and sliding_window is 6; layers of mixt"),
        ("qwen3_moe", TURNS, "layer_types has .* and sliding_window is 6; layers of qwen3_moe are alike"),
        ("qwen2", TURNS[:3], "layer_types has 3 entries and num_hidden_layers is 5; one each"),
        ("mistral", ["chunked_attention"] * 5, "layer_types has chunked_attention; models of mistral have full_att"),
        ("gemma2", TURNS[:3], "layer_types has 3 entries and num_hidden_layers is 5; one each"),
        ("llama4_text", TURNS, "layer_types has sliding_attention; models of llama4_text have chunked_attention, full"),
    ],
)
def test_layer_types_that_have_no_effect_in_theirs(kind: str, types: list[str], message: str) -> None:
    file = next(file for file in FILES if file["model_type"] == kind)
    values = {**file, "sliding_window": 6, "use_sliding_window": True, "num_hidden_layers": 5, "no_rope_layers": None}
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers({**values, "layer_types": types})


def test_layer_types_in_a_folder_of_mistral(tmp_path: Path) -> None:
    """As Ministral: ``transformers`` takes such a folder for one, and both agree on it and on what is exported."""
    torch.manual_seed(1)
    sizes = {**SIZES, "num_attention_heads": 4, "sliding_window": 4, "initializer_range": 0.5}
    made = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)).double()
    made.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "layer_types": TURNS}))
    export(open_model(tmp_path / "theirs"), tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["layer_types"] == TURNS
    tokens = torch.randint(0, 53, (2, 17))
    read = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)(tokens).logits
        for name in ("theirs", "ours")
    ]
    assert relative_error(*read) < 1e-12
    assert relative_error(made.eval()(tokens).logits, read[0]) > 1e-2
    model = transformers_model(tmp_path / "theirs").root.eval()
    found = model(tokens.flatten(), PackedSequences.of_uniform(2, 17)).logits.view(2, 17, 53)
    assert relative_error(found, read[0]) < 2e-6


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_a_factor_that_the_norm_of_llama4_takes_out() -> None:
    file = next(file for file in FILES if file["model_type"] == "llama4_text")
    with pytest.raises(ConfigurationError, match="use_qk_norm=True: its factor of queries and keys has no counterpart"):
        config_from_transformers({**file, "rope_scaling": YARN})
    even = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert config_from_transformers({**file, "rope_scaling": even}).position.scaling is not None
    assert config_from_transformers({**file, "rope_scaling": YARN, "use_qk_norm": False}).position.scaling is not None


NEMOTRON = {
    **{"model_type": "nemotron_h", **SIZES, "layers_block_type": ["mamba", "attention"], "layer_norm_epsilon": 1e-5},
    **{"mamba_num_heads": 4, "mamba_head_dim": 4, "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 4},
}


def test_a_tied_head_of_nemotron_h() -> None:
    """Their class never ties it, so it would compute with another head than ours."""
    with pytest.raises(ConfigurationError, match="tie_word_embeddings is True; only False"):
        config_from_transformers(NEMOTRON)
    config = config_from_transformers({**NEMOTRON, "tie_word_embeddings": False})
    with pytest.raises(ConfigurationError, match="tie_word_embeddings is True; only False"):
        config_to_transformers(replace(config, tie_embeddings=True))


def test_unknown_layers_of_nemotron_h() -> None:
    with pytest.raises(ConfigurationError, match="layers_block_type has convolution; known: linear_attention, mamba"):
        config_from_transformers({**NEMOTRON, "tie_word_embeddings": False, "layers_block_type": ["convolution"]})


Keys = tuple[str, ...]


def whole_files() -> Iterator[tuple[Family, dict[str, Any]]]:
    """A whole ``config.json`` for every ``model_type`` of every family, of the sizes that theirs have by default."""
    fitting: dict[str, dict[str, Any]] = {
        "deepseek_v2": {"num_experts_per_tok": 2},
        "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
        "qwen3_vl": {"text_config": {"hidden_size": 3584}},
        "qwen2_5_vl": {"text_config": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}},
        "llava": {"image_token_index": 31999},
        "llava_next": {"image_token_index": 31999},
    }
    for each in families():
        for kind in each.weights.kinds if each.weights else ():
            values = transformers.AutoConfig.for_model("deepseek_v3" if kind == "kimi_k2" else kind).to_dict()
            values["model_type"] = kind
            for key, value in fitting.get(kind, {}).items():
                values[key] = {**values[key], **value} if isinstance(value, dict) else value
            yield each, values


def keys_of(values: dict[str, Any], before: Keys = ()) -> Iterator[Keys]:
    for key, value in values.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*before, key))


def changed(values: dict[str, Any], path: Keys, *new: Any) -> dict[str, Any]:
    """The same with another value, or without the key."""
    here = dict(values)
    if path[1:]:
        here[path[0]] = changed(here[path[0]], path[1:], *new)
    elif new:
        here[path[0]] = new[0]
    else:
        del here[path[0]]
    return here


def refusal(each: Family, values: dict[str, Any]) -> str:
    """Why a file is refused; empty if it is read."""
    assert each.weights is not None
    try:
        each.weights.config(values)
    except MegalightError as error:
        return str(error)
    return ""


def test_a_missing_null_or_mistyped_value_of_any_file_is_refused_by_its_name() -> None:
    checked = 0
    for each, values in whole_files():
        assert not refusal(each, values)
        for path in keys_of(values):
            key, checked = path[-1], checked + 1
            if key == "model_type":
                continue
            # Defaults of theirs may disagree with the other values, which the message then names.
            assert "wrong kind" not in refusal(each, changed(values, path)), path
            types, _ = TYPES.get(key, ((type(None),), ""))
            for wrong in (None, "false", 61.0, True) if key in TYPES else (None,):
                found = refusal(each, changed(values, path, wrong))
                good = isinstance(wrong, types) and (bool in types or not isinstance(wrong, bool))
                if good or (wrong is None and key in NULLABLE):
                    assert "wrong kind" not in found, path
                else:
                    assert f"{key} is {json.dumps(wrong)}; it must be " in found, path
    assert checked > 1500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 61.0}, r"config\.json: vocab_size is 61\.0; it must be an integer of at least 0\. Write 61\."),
        ({"tie_word_embeddings": "false"}, r'config\.json: tie_word_embeddings is "false"; it must be true or false'),
        ({"hidden_size": None}, r"config\.json: hidden_size is null; it must be an integer"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, r'config\.json: rope_scaling\.factor is "2"; it mu'),
        ({"model_type": ["llama"]}, "model_type is \\['llama'\\]"),
        ({"quantization_config": "fp8"}, r'config\.json: quantization_config is "fp8"; it must be an object'),
    ],
    ids=str,
)
def test_the_file_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FILES[0], **changes}))
    with pytest.raises((CheckpointError, ConfigurationError), match=message):
        open_model(tmp_path)


def test_a_bert_without_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigurationError, match=r"config\.json: .*bert model lacks 'num_hidden_layers'"):
        open_model(tmp_path)
