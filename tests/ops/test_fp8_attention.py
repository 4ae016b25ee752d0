"""Attention in 8 bits, emulated: beside the formulas written out, query by query."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError, LayoutError
from megalight.ops.attention import attention
from megalight.ops.fp8_attention import FP8Attention, FP8AttentionSpec
from megalight.types import PackedSequences
from tests.ops.checks import error

BATCH, LENGTH, HEADS, KV, SIZE = 2, 9, 4, 2, 16
TYPES = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output. Gradients are small, as in training."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV, KV, HEADS)
    made = [torch.randn(BATCH * LENGTH, h, SIZE, generator=generator).to(dtype) for h in heads]
    return [*made[:3], made[3] * 1e-4]


def rounded(x: Tensor, name: str, largest: float | None = None, power: bool = False) -> Tensor:
    """Round to an 8-bit type of torch with one scale for the whole tensor."""
    dtype, limit = TYPES[name]
    factor = torch.tensor(limit) / torch.tensor(x.abs().max().item() if largest is None else largest)
    if power:
        factor = 2.0 ** torch.floor(torch.log2(factor))
    return (x.float() * factor).clamp(-limit, limit).to(dtype).double() * (1.0 / factor).double()


def written_out(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, spec: FP8AttentionSpec) -> list[Tensor]:
    """Output and gradients ``[T, H, D]`` by loops over sequences, heads and queries."""
    scale = spec.scale or 1 / math.sqrt(SIZE)
    rq, rk, rv = (rounded(t, "e4m3", power=spec.power) for t in (q, k, v))
    g = rounded(grad, spec.gradient, power=spec.power)
    out, dq, dk, dv = (torch.zeros_like(t, dtype=torch.float64) for t in (q, q, k, v))
    shares: dict[tuple[int, int, int], Tensor] = {}
    for b in range(BATCH):
        for h in range(HEADS):
            kv = h // (HEADS // KV)
            for i in range(LENGTH):
                t = b * LENGTH + i
                seen = slice(b * LENGTH, t + 1 if spec.causal else (b + 1) * LENGTH)
                scores = rk[seen, kv] @ rq[t, h] * scale
                weights = (scores - scores.max()).exp()
                out[t, h] = rounded(weights, "e4m3", 1.0, spec.power) @ rv[seen, kv] / weights.sum()
                p = weights / weights.sum()
                dv[seen, kv] += torch.outer(rounded(p, "e4m3", 1.0, spec.power), g[t, h])
                shares[b, h, i] = p * (rv[seen, kv] @ g[t, h] - g[t, h] @ out[t, h])
    largest = max(float(ds.abs().max()) for ds in shares.values())
    for (b, h, i), share in shares.items():
        kv, t = h // (HEADS // KV), b * LENGTH + i
        seen = slice(b * LENGTH, b * LENGTH + len(share))
        ds = rounded(share, spec.gradient, largest, spec.power)
        dq[t, h] += ds @ rk[seen, kv] * scale
        dk[seen, kv] += torch.outer(ds, rq[t, h]) * scale
    return [out, dq, dk, dv]


def emulated(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, spec: FP8AttentionSpec) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = FP8Attention("layer", spec, "reference")(*leaves, PackedSequences.of_uniform(BATCH, LENGTH))
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize(
    "change",
    [{}, {"causal": False}, {"scale": 0.5}, {"gradient": "e4m3"}, {"power": True}],
    ids=["plain", "not causal", "scale", "e4m3", "power"],
)
def test_every_product_rounds_its_factors(change: dict[str, object]) -> None:
    spec = FP8AttentionSpec("cpu", torch.float64, SIZE)._replace(**change)
    for found, wanted in zip(emulated(*inputs(), spec), written_out(*inputs(), spec), strict=True):
        assert error(found, wanted) < 1e-9


def test_what_eight_bits_lose() -> None:
    """Three to four bits of each factor: some percent, forward and backward, and never more."""
    data = inputs(torch.bfloat16)
    leaves = [t.double().requires_grad_() for t in data[:3]]
    exact = attention(*leaves, PackedSequences.of_uniform(BATCH, LENGTH), backend="reference")
    wanted = [exact, *torch.autograd.grad(exact, leaves, data[3].double())]
    for found, true in zip(emulated(*data, FP8AttentionSpec("cpu", torch.bfloat16, SIZE)), wanted, strict=True):
        assert found.dtype == torch.bfloat16
        assert 5e-3 < error(found, true) < 0.1


def test_a_value_that_is_not_a_number_stays_visible() -> None:
    q, k, v, grad = inputs()
    v[3, 0, 0] = torch.nan
    assert emulated(q, k, v, grad, FP8AttentionSpec("cpu", torch.float64, SIZE))[0].isnan().any()


@pytest.mark.parametrize(("size", "backend"), [(24, "reference"), (144, "reference"), (16, "transformer_engine")])
def test_what_cannot_be_served_is_refused(size: int, backend: str) -> None:
    with pytest.raises(BackendError, match=r"multiple of 16 up to 128|transformer_engine: needs"):
        FP8Attention("layer", FP8AttentionSpec("cpu", torch.bfloat16, size), backend)


@pytest.mark.parametrize(
    ("sequences", "match"),
    [
        (PackedSequences.of_lengths([8, 10]), "their lengths differ"),
        (replace(PackedSequences.of_uniform(2, 9), keys=PackedSequences.of_uniform(2, 9)), "the keys are not"),
    ],
)
def test_sequences_that_cannot_be_served_are_refused(sequences: PackedSequences, match: str) -> None:
    q, k, v, _ = inputs()
    with pytest.raises(LayoutError, match=f"layers.0: .*{match}"):
        FP8Attention("layers.0", FP8AttentionSpec("cpu", torch.float64, SIZE), "reference")(q, k, v, sequences)
