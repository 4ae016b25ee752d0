"""Rotary embedding over several axes."""

from __future__ import annotations

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.ops.rotary import RotaryAxes, RotaryScaling, apply_rotary, rotary_table
from tests.ops.checks import error

PLACES = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))


def test_pairs_by_hand() -> None:
    assert RotaryAxes((1, 2, 2)).of_pairs == (0, 1, 1, 2, 2)
    assert RotaryAxes((4, 2, 1), interleaved=True).of_pairs == (0, 1, 2, 0, 1, 0, 0)
    published = RotaryAxes((24, 20, 20), interleaved=True).of_pairs  # Qwen3-VL
    assert published[:60] == (0, 1, 2) * 20
    assert published[60:] == (0,) * 4


def test_each_pair_turns_with_its_axis() -> None:
    axes = RotaryAxes((2, 1, 3))
    found = rotary_table(PLACES.double(), 12, 100.0, RotaryScaling("linear", 2.0), axes)
    for pair, axis in enumerate(axes.of_pairs):
        angles = PLACES[axis].double() * 100.0 ** (-2 * pair / 12) / 2
        assert error(found[0][:, pair], angles.cos()) < 1e-14
        assert error(found[1][:, pair], angles.sin()) < 1e-14


@pytest.mark.parametrize("interleaved", [False, True])
def test_text_rotates_as_with_one_axis(interleaved: bool) -> None:
    axes, one = RotaryAxes((3, 2, 1), interleaved), torch.arange(7)
    expected = rotary_table(one, 12, 100.0)
    for positions in (one, one.expand(3, -1)):
        for ours, theirs in zip(rotary_table(positions, 12, 100.0, axes=axes), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_blocks_equal_qwen2_5_vl() -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    config = theirs.Qwen2_5_VLTextConfig(hidden_size=16, num_attention_heads=1, rope_parameters=rope)
    q, k = torch.randn(2, 1, 1, 9, 16, generator=torch.Generator().manual_seed(1))
    cos, sin = theirs.Qwen2_5_VLRotaryEmbedding(config)(q, PLACES[:, None])
    expected = theirs.apply_multimodal_rotary_pos_emb(q, k, cos, sin, rope["mrope_section"])
    table = rotary_table(PLACES, 16, 1e6, axes=RotaryAxes((2, 3, 3)))
    for heads, rotated in zip((q, k), expected, strict=True):
        assert error(apply_rotary(heads[0].transpose(0, 1), *table), rotated[0].transpose(0, 1)) < 1e-5


def test_interleaved_equals_qwen3_vl() -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_vl import modeling_qwen3_vl as theirs

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 3, 1], "mrope_interleaved": True}
    config = theirs.Qwen3VLTextConfig(hidden_size=16, num_attention_heads=1, head_dim=16, rope_parameters=rope)
    expected = theirs.Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), PLACES[:, None])
    found = rotary_table(PLACES, 16, 5e6, axes=RotaryAxes((4, 3, 1), interleaved=True))
    for ours, table in zip(found, expected, strict=True):
        assert error(ours, table[0, :, :8]) < 1e-5  # theirs holds each angle twice


def test_bad_axes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"sections of rotary axes are \[4\]; give at least two"):
        RotaryAxes((4,))
    with pytest.raises(ConfigurationError, match="the first must be the largest"):
        RotaryAxes((1, 2, 2), interleaved=True)
    with pytest.raises(ConfigurationError, match="sum to 9, but an axis would take pair 11 in its last turn"):
        RotaryAxes((4, 1, 4), interleaved=True)
    with pytest.raises(ValueError, match="sum to 5; 12 rotated features have 6 pairs"):
        rotary_table(PLACES, 12, 100.0, axes=RotaryAxes((1, 2, 2)))
    with pytest.raises(ValueError, match=r"positions have 3 rows.*has 2 axes"):
        rotary_table(PLACES, 12, 100.0, axes=RotaryAxes((3, 3)))
    with pytest.raises(ValueError, match="has one axis"):
        rotary_table(PLACES, 12, 100.0)


def test_axes_that_restart_have_the_frequencies_of_a_narrower_head_each() -> None:
    places = torch.tensor([[0, 3, 5], [2, 0, 7]]).double()
    cos, sin = rotary_table(places, 8, 100.0, axes=RotaryAxes((2, 2), restart=True))
    for axis in range(2):
        expected = rotary_table(places[axis], 4, 100.0)
        assert torch.equal(cos[:, 2 * axis : 2 * axis + 2], expected[0])
        assert torch.equal(sin[:, 2 * axis : 2 * axis + 2], expected[1])
    with pytest.raises(ConfigurationError, match="interleaved and restart"):
        RotaryAxes((2, 2), interleaved=True, restart=True)
    with pytest.raises(ValueError, match="have no scaling; leave it out"):
        rotary_table(places, 8, 100.0, RotaryScaling("linear", 2.0), RotaryAxes((2, 2), restart=True))
