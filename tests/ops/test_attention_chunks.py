"""Attention within chunks equals attention under an explicit mask, with keys of earlier tokens as well."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.ops.attention import attention
from megalight.types import PackedSequences

LENGTHS = [11, 4, 1, 8]


def expected(q: Tensor, k: Tensor, v: Tensor, chunk: int, causal: bool, sink: Tensor | None) -> Tensor:
    """One sequence, whose last tokens are the queries."""
    repeats = q.shape[1] // k.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (k, v))
    places, index = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    seen = (places // chunk == index // chunk) & ((index <= places) | torch.tensor(not causal))
    scores = torch.einsum("qhd,khd->hqk", q, key) / math.sqrt(q.shape[-1])
    weights = scores.exp() * seen
    total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink.exp()[:, None, None])
    return torch.einsum("hqk,khd->qhd", weights / total, value)


def drawn(queries: list[int], keys: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(queries), 4, 6), (sum(keys), 2, 6), (sum(keys), 2, 5)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("chunk", [1, 3, 4, 8, 20])
@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"backend": "sdpa"}, {"sink": torch.linspace(-1, 1, 4).double()}]
)
def test_whole_sequences(chunk: int, options: dict[str, Any]) -> None:
    q, k, v = drawn(LENGTHS, LENGTHS)
    found = attention(q, k, v, PackedSequences.of_lengths(LENGTHS), chunk=chunk, **options)
    parts = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    wanted = torch.cat([expected(*x, chunk, options.get("causal", True), options.get("sink")) for x in parts])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(found)
    gradients = (torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("queries", [[1, 1, 1], [5, 2, 9]])
def test_keys_of_earlier_tokens(queries: list[int]) -> None:
    """A query that begins a chunk sees itself alone; one at the end sees all of its chunk."""
    keys = [8, 12, 9]
    q, k, v = drawn(queries, keys)
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    wanted = torch.cat([expected(*x, 4, True, None) for x in parts])
    described = PackedSequences.of_lengths(keys)
    whole = PackedSequences.of_lengths(queries)
    sequences = PackedSequences(whole.lengths, whole.cu_seqlens, whole.positions, whole.uniform, keys=described)
    found = attention(q, k, v, sequences, chunk=4)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
