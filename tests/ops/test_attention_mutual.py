"""Runs of tokens that see each other: equal to a mask, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalight.nn import InnerAttention
from megalight.types import PackedSequences


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, 4, 6), (rows, 2, 6), (rows, 2, 5)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def by_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    runs: list[tuple[int, int]],
    window: int,
    scale: float = 0.3,
) -> Tensor:
    """Attention with a whole mask."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    place = torch.arange(len(q), device=q.device)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance <= window)
    for first, count in runs:
        here = (place >= first) & (place < first + count)
        seen |= here[:, None] & here
    seen &= sequence[:, None] == sequence
    key, value = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("lengths", "runs"),
    [
        ([12], [(0, 4)]),
        ([7, 9, 4], [(2, 5), (8, 1), (10, 3), (16, 4)]),
        ([8, 8], [(3, 5), (8, 5)]),
    ],
    ids=["one", "ragged", "uniform"],
)
def test_equals_a_mask(lengths: list[int], runs: list[tuple[int, int]], window: int | None) -> None:
    tensors = inputs(sum(lengths))
    inner = InnerAttention(scale=0.3, window=window)
    inner.mutual = True
    sequences = replace(PackedSequences.of_lengths(lengths), runs=tuple(runs))
    found = inner(*tensors, sequences)
    expected = by_mask(*tensors, lengths, runs, sum(lengths) if window is None else window)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    factor = torch.randn_like(found)
    gradients = [torch.autograd.grad((y * factor).sum(), tensors) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    # Padding, and a copy, keep the runs; without `mutual` they mean nothing.
    padded = sequences.pad_to(7).to("cpu")
    wide = [torch.cat([t, t[: padded.num_tokens - len(t)]]) for t in tensors]
    torch.testing.assert_close(inner(*wide, padded)[: len(found)], found)
    inner.mutual = False
    causal = by_mask(*tensors, lengths, [], sum(lengths) if window is None else window)
    torch.testing.assert_close(inner(*tensors, sequences), causal)


def test_runs_of_single_tokens_are_causal() -> None:
    tensors = inputs(6)
    inner = InnerAttention()
    expected = inner(*tensors, PackedSequences.of_uniform(1, 6))
    inner.mutual = True
    sequences = replace(PackedSequences.of_uniform(1, 6), runs=((1, 1), (4, 1)))
    assert torch.equal(inner(*tensors, sequences), expected)
