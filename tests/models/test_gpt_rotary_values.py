"""Rotary axes in configurations of `transformers`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalight.errors import ConfigurationError
from megalight.models.gpt import PositionConfig
from megalight.models.gpt.hugging_face.rotary import rotary_from, rotary_to
from megalight.ops.rotary import RotaryAxes, RotaryScaling
from tests.strategies.training import CONFIGS


def test_axes_are_read_and_written() -> None:
    older = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    assert rotary_from(older) == PositionConfig(base=1e6, axes=RotaryAxes((16, 24, 24)))
    for scaling in (None, RotaryScaling("linear", 4.0)):
        position = PositionConfig(base=5e6, scaling=scaling, axes=RotaryAxes((24, 20, 20), interleaved=True))
        assert rotary_from(rotary_to(position)) == position


def test_axes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"position\.axes\.sections are \[1, 1, 1\]; they must sum to 4"):
        replace(CONFIGS["gqa"], position=PositionConfig(axes=RotaryAxes((1, 1, 1))))
    with pytest.raises(ConfigurationError, match="only rope has axes"):
        PositionConfig(kind="none", axes=RotaryAxes())
