from __future__ import annotations

import pytest
import torch

from megalight.ops.attention import hopper
from megalight.ops.attention.hopper import seen
from megalight.ops.attention.reference import mask
from megalight.types import PackedSequences


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 0, 3, 20])
@pytest.mark.parametrize(
    ("lengths", "keys"), [((7,), (7,)), ((1, 5), (4, 9)), ((6, 2), (2, 2))], ids=["same", "more keys", "fewer keys"]
)
def test_how_many_keys_a_query_sees(
    lengths: tuple[int, ...], keys: tuple[int, ...], window: int | None, causal: bool
) -> None:
    pairs = 0
    for length, count in zip(lengths, keys, strict=True):
        allowed = mask(length, count, causal, window, torch.device("cpu"))
        pairs += length * count if allowed is None else int(allowed.sum())
    assert seen(lengths, keys, causal, window) == pytest.approx(pairs / sum(lengths))


def test_other_devices_keep_the_other_kernel() -> None:
    q = torch.zeros(2048, 1, 128, dtype=torch.bfloat16)
    assert not hopper.serves(q, q, PackedSequences.of_lengths([2048], "cpu"), True, None)
