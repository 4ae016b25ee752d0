"""Configurations: what is derived, what is refused, and the way through JSON."""

import dataclasses
import json

import pytest

from megalight.errors import ConfigurationError
from megalight.models.gpt import (
    AttentionConfig,
    BackendConfig,
    DropoutConfig,
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
        ({"attention": {"chunk": 0}}, r"attention\.chunk is 0; it must be at least 1 token"),
        ({"attention": {"chunk": 4, "window": 4}}, "a layer has one of them"),
        ({"attention": {"qk_norm": True, "qk_l2_norm": True}}, "two norms of the same heads"),
        ({"norm": {"kind": "layer", "around_zero": True}}, "weights around zero are of norm.kind=rms"),
        ({"position": {"local_base": 10.0}}, "no layer has a window or chunks"),
        ({"position": {"kind": "none", "local_base": 10.0}}, "it must be above 1, with rope"),
        ({"attention": {"softcap": -1.0}}, r"attention\.softcap is -1"),
        ({"attention": {"scale": 0.0}}, r"attention\.scale is 0"),
        ({"attention": {"window_pattern": []}}, "window_pattern is empty"),
        ({"attention": {"window_pattern": 0}}, "it must be at least 1, or a list"),
        ({"attention": {"softmax": "learned"}}, "Did you mean 'learnable'"),
        ({"attention": {"temperature": {"length": 8}}}, "all layers rotate"),
        ({"attention": {"temperature": {"length": 0}}}, r"temperature\.length is 0"),
        ({"attention": {"temperature": {"scale": 0.0}}}, r"temperature\.scale is 0"),
        ({"dropout": {"hidden": 1.0}}, r"dropout\.hidden is 1.0"),
        ({"init": {"std": 0.0}}, r"init\.std is 0.0"),
    ],
)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigurationError, match=message):
        GPTConfig.from_dict({**SIZES, **values})


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
        backends=BackendConfig(attention="reference"),
    )
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for name in PRESETS:
        assert GPTConfig.from_dict(json.loads(json.dumps(PRESETS[name].to_dict()))) == PRESETS[name]


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPTConfig(**SIZES).num_layers = 3
