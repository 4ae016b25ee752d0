"""Rotary axes in configurations of `transformers`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.models.gpt import PositionConfig
from megalight.models.gpt.hugging_face.common import rotary_from, rotary_to
from megalight.ops.rotary import RotaryAxes, RotaryScaling
from tests.strategies.training import CONFIGS
from tests.support.reference_gpt import relative_error


def test_axes_are_read_and_written() -> None:
    older = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    assert rotary_from(older) == PositionConfig(base=1e6, axes=RotaryAxes((16, 24, 24)))
    for scaling in (None, RotaryScaling("linear", 4.0)):
        position = PositionConfig(base=5e6, scaling=scaling, axes=RotaryAxes((24, 20, 20), interleaved=True))
        assert rotary_from(rotary_to(position)) == position


def test_dynamic_scaling_changes_no_sequence_that_is_read_and_is_written_again() -> None:
    """As InternVL3 has it. ``alpha`` of Hunyuan changes short sequences, too."""
    pytest.importorskip("transformers")
    from transformers import Qwen2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": 32}
    values = {"rope_theta": 1e6, "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}}
    position = rotary_from(values)
    assert position == PositionConfig(base=1e6, scaling=RotaryScaling("dynamic", 2.0))
    frequencies, factor = ROPE_INIT_FUNCTIONS["dynamic"](Qwen2Config(**sizes, **values), "cpu", seq_len=32)
    assert factor == 1
    assert position.scaling is not None
    assert relative_error(position.scaling.frequencies(64, 1e6), frequencies.double()) < 1e-6
    configs = Qwen2Config(**sizes, **values), Qwen2Config(**sizes, **rotary_to(position))
    longer = [ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=100)[0] for config in configs]
    assert torch.equal(*longer)
    assert not torch.equal(longer[0], frequencies)
    with pytest.raises(ConfigurationError, match=r"rope_type 'dynamic' with alpha=1000\.0 has no counterpart"):
        rotary_from({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}})


def test_axes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"position\.axes\.sections are \[1, 1, 1\]; they must sum to 4"):
        replace(CONFIGS["gqa"], position=PositionConfig(axes=RotaryAxes((1, 1, 1))))
    with pytest.raises(ConfigurationError, match="only rope has axes"):
        PositionConfig(kind="none", axes=RotaryAxes())
