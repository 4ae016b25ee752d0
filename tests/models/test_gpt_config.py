"""Configurations: what is derived, what is refused, and the way through JSON."""

import dataclasses
import json

import pytest

from megalight.errors import ConfigurationError
from megalight.models.gpt import (
    AttentionConfig,
    DropoutConfig,
    GPTBackendConfig,
    GPTConfig,
    InitConfig,
    NormConfig,
    PositionConfig,
)
from megalight.models.gpt.presets import PRESETS
from megalight.ops.rotary import RotaryScaling

SIZES = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "vocab_size": 61, "max_sequence_length": 32}


def test_sizes_left_out_are_derived():
    config = GPTConfig(**SIZES)
    assert (config.num_kv_heads, config.head_dim, config.ffn_hidden_size) == (4, 6, 96)
    assert GPTConfig(**SIZES, head_dim=5).head_dim == 5
    assert GPTConfig(**SIZES, position=PositionConfig(fraction=0.5)).rotary_dim == 2
    assert GPTConfig(**SIZES).residual_std == pytest.approx(0.01)
    assert GPTConfig(**SIZES, init=InitConfig(scale_residual=False)).residual_std == 0.02


def test_windows_follow_the_pattern():
    attention = AttentionConfig(window=7, window_pattern=[True, True, False])
    assert [attention.window_of(i) for i in range(5)] == [7, 7, None, 7, 7]
    assert AttentionConfig().window_of(0) is None
    every = AttentionConfig(window=7, window_pattern=3)  # each third layer has none
    assert [every.window_of(i) for i in range(6)] == [7, 7, None, 7, 7, None]
    assert AttentionConfig(window=7, window_pattern=1).window_of(0) is None
    assert every == AttentionConfig(window=7, window_pattern=[True, True, False])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be at least 1"),
        ({"num_layers": 10**12}, "num_layers is 1000000000000; it must be at most 10000"),
        ({"num_heads": 5}, "hidden_size 24 is not a multiple of num_heads 5"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_kv_heads": -4}, "num_kv_heads is -4"),
        ({"activation": "swigluu"}, "activation is 'swigluu'.*Did you mean 'swiglu'"),
        ({"logit_softcap": 0.0}, "logit_softcap is 0.0; it must be above 0"),
        ({"head_dim": 1}, "less than two features"),
        ({"vocab_size": "many"}, "cannot be made from"),
        ({"hidden": 3}, "unknown key 'hidden'.*Did you mean 'hidden_size'"),
        ({"norm": {"kind": "batch"}}, "norm.kind is 'batch'; it must be one of rms, layer"),
        ({"norm": {"epsilon": 1}}, r"unknown key 'norm\.epsilon'.*Did you mean 'eps'"),
        ({"norm": {"eps": 0.0}}, r"norm\.eps is 0.0"),
        ({"position": {"fraction": 1.5}}, r"position\.fraction is 1.5"),
        ({"position": {"base": 0.5}}, r"position\.base is 0.5"),
        ({"position": {"pattern": [False]}}, "at least one entry must be true"),
        ({"position": {"kind": "none", "pattern": [True, False]}}, "it chooses layers that rotate"),
        ({"attention": {"window": -1}}, r"attention\.window is -1"),
        ({"attention": {"window_pattern": [True, False]}}, r"window_pattern is \[True, False\] without a window"),
        ({"attention": {"window_pattern": 2}}, "without a window; set attention.window or"),
        ({"attention": {"chunk": 0}}, r"attention\.chunk is 0; it must be a whole number, at least 1"),
        ({"attention": {"chunk": 4, "window": 4}}, "a layer has one of them"),
        ({"attention": {"qk_norm": True, "qk_l2_norm": True}}, "two norms of the same heads"),
        ({"norm": {"kind": "layer", "around_zero": True}}, "weights around zero are of norm.kind=rms"),
        ({"position": {"local_base": 10.0}}, "no layer that rotates has a window or chunks"),
        ({"position": {"kind": "none", "local_base": 10.0}}, "it must be above 1, with rope"),
        ({"attention": {"softcap": -1.0}}, r"attention\.softcap is -1"),
        ({"attention": {"scale": 0.0}}, r"attention\.scale is 0"),
        ({"attention": {"window_pattern": []}}, "window_pattern is empty"),
        ({"attention": {"window_pattern": 0}}, "it must be at least 1, or a list"),
        ({"attention": {"softmax": "learned"}}, "Did you mean 'learnable'"),
        ({"attention": {"temperature": {"length": 8}}}, "all layers with attention rotate"),
        ({"attention": {"temperature": {"length": 0}}}, r"temperature\.length is 0"),
        ({"attention": {"temperature": {"scale": 0.0}}}, r"temperature\.scale is 0"),
        ({"dropout": {"hidden": 1.0}}, r"dropout\.hidden is 1.0"),
        ({"init": {"std": 0.0}}, r"init\.std is 0.0"),
    ],
)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigurationError, match=message):
        GPTConfig.from_dict({**SIZES, **values})


MAMBA = {"mamba": {"num_heads": 4, "head_dim": 6, "state_size": 4, "num_groups": 2}}
HYBRID = {**MAMBA, "num_layers": 4, "layer_pattern": "M*M*"}
EVEN = {"window": 3, "window_pattern": [True, False]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**HYBRID, "attention": EVEN}, r"\[True, False\] gives it to no layer with attention, which are \[1, 3\]"),
        (
            {"attention": {"chunk": 3, "window_pattern": 1}},
            r"attention\.chunk is 3, and .*\[False\] gives it to no layer",
        ),
        ({**HYBRID, "position": {"pattern": [True, False]}}, r"rotates no layer with attention, which are \[1, 3\]"),
        (
            {**HYBRID, "position": {"pattern": [False, True]}, "attention": {"temperature": {}}},
            "all layers with attention rotate",
        ),
        (
            {"num_layers": 2, "attention": EVEN, "position": {"pattern": [False, True], "local_base": 10.0}},
            "no layer that rotates has a window",
        ),
        ({"attention": {"qk_l2_norm": True}, "position": {"kind": "none"}}, "it norms in layers that rotate"),
        (
            {**MAMBA, "mixer_pattern": ["mamba"], "attention": {"softcap": 3.0, "qk_norm": True}},
            r"attention\.qk_norm, attention\.softcap are set, and no layer has attention",
        ),
        (
            {**HYBRID, "layer_pattern": "MMM-", "mixer_pattern": ["latent_attention"], "latent": {"kv_rank": 8}},
            r"latent is set, and layer_pattern 'MMM-' has no attention",
        ),
        (
            {"moe": {"num_experts": 4, "pattern": [False, False, True]}},
            r"moe\.pattern gives experts from layer 2 on, and num_layers is 2",
        ),
        ({"conv_kernel": 4}, "no entry of mixer_pattern is conv"),
        (
            {"position": {"kind": "learned", "fraction": 0.5, "interleaved": True}},
            r"position\.fraction, position\.interleaved with position\.kind=learned; only rope rotates",
        ),
        ({"position": {"kind": "none", "scaling": {"kind": "linear"}}}, r"position\.scaling with position\.kind=none"),
        ({"position": {"scaling": {"kind": "linear", "beta_fast": 8.0}}}, "beta_fast is 8.0 .*'linear', .*; yarn do"),
        ({"position": {"fraction": 0.5, "scaling": {"kind": "ntk"}}}, "ntk with 2 rotated features; .* at least 4"),
        ({"position": {"scaling": {"factor": float("nan")}}}, "factor is nan; it must be at least 1"),
        ({"attention": {"softcap": float("inf")}}, r"attention\.softcap is inf; it must be above 0 and finite"),
        ({"attention": {"window": 2.5}}, r"attention\.window is 2\.5; it must be a whole number"),
        (
            {**MAMBA, "attention_ratio": 0.1},
            "attention_ratio=0.1 of 2 layers gives none such.*choose one from 0.5 to 0.5",
        ),
        ({**MAMBA, "mlp_ratio": float("nan")}, "mlp_ratio=nan of 2 layers"),
    ],
)
def test_settings_that_reach_no_layer_are_refused(values, message):
    with pytest.raises(ConfigurationError, match=message):
        GPTConfig.from_dict({**SIZES, **values})


def test_a_part_of_a_model_keeps_settings_of_mixers_behind_its_layers():
    config = GPTConfig(**SIZES, mixer_pattern=("conv", "conv", "attention"), attention=AttentionConfig(qk_norm=True))
    assert [config.mixer_of(layer) for layer in range(2)] == ["conv", "conv"]


def test_missing_sizes_are_named():
    with pytest.raises(ConfigurationError, match="vocab_size"):
        GPTConfig.from_dict({name: value for name, value in SIZES.items() if name != "vocab_size"})


def test_through_json_and_back():
    config = GPTConfig(
        **SIZES,
        num_kv_heads=2,
        norm=NormConfig(kind="layer", eps=1e-6),
        position=PositionConfig(base=5e5, scaling=RotaryScaling(factor=32.0)),
        attention=AttentionConfig(qkv_bias=True, window=3, window_pattern=(True, False)),
        dropout=DropoutConfig(hidden=0.1),
        backends=GPTBackendConfig(attention="reference"),
    )
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for name in PRESETS:
        assert GPTConfig.from_dict(json.loads(json.dumps(PRESETS[name].to_dict()))) == PRESETS[name]


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPTConfig(**SIZES).num_layers = 3
