"""What the two-level kind works out about shares, on the device where the sequences are."""

from __future__ import annotations

import pytest

from megalight.parallel.context.attention import _joint
from megalight.types import PackedSequences


@pytest.mark.parametrize("lengths", [[16, 16], [24, 8]])
def test_indices_are_on_the_device_of_the_sequences(lengths: list[int]) -> None:
    share, _ = PackedSequences.of_lengths(lengths, "meta").zigzag(1, 4)
    assert share.context is not None
    joint, order = _joint(share.context, 2)
    assert {joint.device.type, joint.positions.device.type, order.device.type} == {"meta"}
