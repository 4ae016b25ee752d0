"""Softmax with sinks: equal to one more key without a value, in the reference and built from blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops.attention import attention
from megalight.types import PackedSequences

LENGTHS = [5, 1, 7]


def inputs(rows: int = 13) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, 4, 6), (rows, 2, 6), (rows, 2, 5), (4,)]
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).mul_(1.5).requires_grad_() for shape in shapes
    )


def by_loop(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Query by query, head by head."""
    rows, start = [], 0
    for length in lengths:
        for t in range(length):
            first = 0 if window is None else max(0, t - window)
            heads = []
            for h in range(4):
                keys = k[start + first : start + t + 1, h // 2]
                powers = (keys @ q[start + t, h] / 6**0.5).exp()
                heads.append(powers @ v[start + first : start + t + 1, h // 2] / (powers.sum() + sink[h].exp()))
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["reference", "block"])
@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("lengths", [LENGTHS, [4, 4, 4]], ids=["ragged", "uniform"])
def test_equals_the_formula(backend: str, window: int | None, lengths: list[int]) -> None:
    q, k, v, sink = tensors = inputs(sum(lengths))
    sequences = PackedSequences.of_lengths(lengths)
    assert (sequences.uniform is None) == (lengths is LENGTHS)
    found = attention(q, k, v, sequences, window=window, sink=sink, backend=backend)
    expected = by_loop(q, k, v, sink, lengths, window)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    factor = torch.randn_like(found)
    gradients = [torch.autograd.grad((y * factor).sum(), tensors) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "block"])
def test_limits(backend: str) -> None:
    """Without a sink at minus infinity, and nothing left for the values at a huge one; never anything else."""
    q, k, v, _ = inputs()
    sequences = PackedSequences.of_lengths(LENGTHS)
    plain = attention(q, k, v, sequences)
    none = attention(q, k, v, sequences, sink=torch.full((4,), -torch.inf).double(), backend=backend)
    torch.testing.assert_close(none, plain, rtol=1e-12, atol=1e-12)
    for size in (-1e10, 1e10):
        sink = torch.full((4,), size, dtype=torch.float64, requires_grad=True)
        found = attention(q, k, v, sequences, sink=sink, backend=backend)
        (gradient,) = torch.autograd.grad(found.sum(), sink)
        assert found.isfinite().all()
        assert gradient.isfinite().all()
        torch.testing.assert_close(found, plain if size < 0 else torch.zeros_like(plain), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "block"])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("lengths", "new"), [([5, 1, 7], [2, 1, 4]), ([6, 6], [3, 3]), ([7, 6], [1, 1])])
def test_continued_sequences_have_sinks(lengths: list[int], new: list[int], window: int | None, backend: str) -> None:
    """The last queries of a sequence see the same as in a pass over all of them."""
    q, k, v, sink = inputs(sum(lengths))
    whole = by_loop(q, k, v, sink, lengths, window)
    last = torch.cat([torch.arange(e - n, e) for e, n in zip(accumulate(lengths), new, strict=True)])
    sequences = replace(PackedSequences.of_lengths(new), keys=PackedSequences.of_lengths(lengths))
    found = attention(q[last], k, v, sequences, window=window, sink=sink, backend=backend)
    torch.testing.assert_close(found, whole[last], rtol=1e-12, atol=1e-12)
    factor = torch.randn_like(found)
    gradients = [torch.autograd.grad((y * factor).sum(), (q, k, v, sink)) for y in (found, whole[last])]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_backends_without_sinks_are_refused_by_name() -> None:
    q, k, v, sink = inputs()
    sequences = PackedSequences.of_lengths(LENGTHS)
    with pytest.raises(BackendError, match=r"sdpa.*has no sinks"):
        attention(q, k, v, sequences, sink=sink, backend="sdpa")
    with pytest.raises(BackendError, match=r"block.*serves attention with sinks only"):
        attention(q, k, v, sequences, backend="block")
    with pytest.raises(BackendError, match=r"block.*has no soft cap"):
        attention(q, k, v, sequences, sink=sink, softcap=2.0, backend="block")
