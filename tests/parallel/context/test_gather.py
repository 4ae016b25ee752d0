"""The all-gather kind with a share that is the whole: its masks, blocks and orders without other ranks."""

from __future__ import annotations

import pytest
import torch

from megalight.nn import InnerAttention
from megalight.ops.attention import attention
from megalight.parallel.context import all_gather
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.mesh import ParallelMesh
from megalight.types import PackedSequences
from tests.parallel.gathering import relative_error

LENGTHS = {"equal": [64, 64, 64], "ragged": [64, 3, 50]}
OPTIONS = [{}, {"causal": False}, {"window": 9}]
DEVICES = [
    pytest.param("cpu", torch.float64, 1e-9),
    pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "dtype", "bound"), DEVICES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_one_share_is_the_whole(lengths: str, options: dict, device: str, dtype: torch.dtype, bound: float) -> None:
    sequences = PackedSequences.of_lengths(LENGTHS[lengths], device)
    share, index = sequences.zigzag(0, 1)
    real = index >= 0
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(share.num_tokens, 4 * (8 + 2 + 2 + 8) * 16, generator=generator).to(device, dtype)
    heads = [part.unflatten(1, (-1, 64)) for part in drawn.split([512, 128, 128, 512], 1)]  # strided views
    q, k, v = (x.detach().requires_grad_() for x in heads[:3])
    out = all_gather.attend(InnerAttention(**options), q, k, v, share, ContextGroups(ParallelMesh()))
    weight = heads[3] * real[:, None, None]
    (out * weight).sum().backward()

    exact = [x.detach()[real].double().requires_grad_() for x in (q, k, v)]
    wanted = attention(*exact, sequences, backend="reference", **options)
    (wanted * weight[real].double()).sum().backward()
    assert relative_error(out[real], wanted) <= bound
    for x, reference in zip((q, k, v), exact, strict=True):
        assert relative_error(x.grad[real], reference.grad) <= bound


@pytest.mark.parametrize(
    ("lengths", "causal", "dense"),
    [([8, 8], True, True), ([7, 7], True, True), ([7, 7], False, True), ([7, 8], True, True), ([7, 8], False, False)],
)
def test_where_blocks_are_dense(lengths: list[int], causal: bool, dense: bool) -> None:
    """Padded sequences may be equally long where the real ones are not; without a mask that is not enough."""
    share, _ = PackedSequences.of_lengths(lengths).zigzag(1, 2)
    assert share.context is not None
    assert (all_gather.layout_of(share, share.context, causal) is not None) == dense


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"backend": "cudnn"}, True),
        ({"backend": "sdpa"}, False),
        ({"window": 3}, False),
        ({"softcap": 1.0}, False),
    ],
)
def test_what_blocks_can_do(options: dict, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(all_gather, "attend_dense", lambda q, *args, **kwargs: asked.append(kwargs) or q)
    monkeypatch.setattr(InnerAttention, "forward", lambda self, q, *args: q)
    share, _ = PackedSequences.of_lengths([8, 8]).zigzag(0, 1)
    x = torch.zeros(16, 2, 4)
    all_gather.attend(InnerAttention(**options), x, x, x, share, ContextGroups(ParallelMesh()))
    assert bool(asked) == plain
