"""Samples of rows: kept tokens, the kernels against the reference, columns over several ranks, and distributions."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.imports import has
from megalight.ops.sample_tokens import (
    FAILED,
    SamplingRows,
    VocabularyRanks,
    kept_mask,
    reference_best,
    reference_cut,
    reference_peak,
    sample_tokens,
)


def rows_of(count: int, **options: Any) -> SamplingRows:
    """Rows with these settings each, or with one for all."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(options.get(name, default), dtype=dtype).expand(count)

    reals = [column(*pair, torch.float64) for pair in (("temperature", 1), ("top_p", 1), ("min_p", 0))]
    numbers = [column(*pair, torch.int64) for pair in (("top_k", 2**31), ("seed", 3), ("position", 0))]
    return SamplingRows(torch.stack(reals), torch.stack(numbers), False, True)


def kept(logits: Tensor, **options: Any) -> list[list[int]]:
    rows, peak = rows_of(len(logits), **options), reference_peak(logits)[0]
    mask = kept_mask(logits, rows, peak, reference_cut(logits, rows, peak))
    return [row.nonzero().flatten().tolist() for row in mask]


def test_each_row_has_its_own_settings() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15], dtype=torch.float64).log().expand(6, 4)
    found = kept(
        logits,
        top_k=[2, 9, 9, 9, 3, 9],
        top_p=[1, 0.76, 1, 1, 0.8, 1],
        min_p=[0, 0, 0.3, 0.5, 0, 0.3],
        temperature=[1, 1, 1, 1, 1, 0.5],
    )
    assert found == [[1, 2], [1, 2, 3], [1, 2, 3], [1, 2], [1, 2], [1]]


def test_equal_logits_are_kept_by_top_k_and_in_order_by_top_p() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, -3.0]])
    assert kept(logits, top_k=3) == [[0, 1, 2, 3, 4]]
    assert kept(logits, top_p=0.7) == [[0, 1, 4]]
    assert kept(logits, top_p=1e-9) == [[1]]


def chi_square(logits: Tensor, expected: Tensor, **options: Any) -> None:
    """Compare 40,000 samples at different positions with a distribution: 5 standard deviations of the statistic."""
    draws = 40000
    rows = rows_of(draws, position=torch.arange(draws), **options)
    counts = sample_tokens(logits.expand(draws, -1), rows).bincount(minlength=len(expected))
    assert not counts[expected == 0].any()
    expected, counts = expected[expected > 0] * draws, counts[expected > 0]
    free = len(counts) - 1
    assert ((counts - expected).square() / expected).sum() < free + 5 * (2 * free) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_follow_the_distribution(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(5)).to(dtype)
    chances = (logits[0].double() / 0.8).softmax(-1)
    chi_square(logits, chances, temperature=0.8)
    ordered, order = chances.sort(descending=True)
    for name, value, count in (
        ("top_k", 7, 7),
        ("top_p", 0.6, int((ordered.cumsum(0) < 0.6).sum()) + 1),
        ("min_p", 0.2, int((ordered >= 0.2 * ordered[0]).sum())),
    ):
        part = torch.zeros_like(chances).scatter(0, order[:count], ordered[:count])
        chi_square(logits, part / part.sum(), temperature=0.8, **{name: value})


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of rows that have no sample
@pytest.mark.skipif(
    not has("triton") or torch.cuda.is_available(), reason="needs triton, and no GPU (where the kernels run for real)"
)
@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.float32, 37), (torch.float16, 500), (torch.bfloat16, 9000)], ids=str
)
def test_kernels_sample_the_same(dtype: torch.dtype, columns: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    module = importlib.import_module("megalight.ops.sample_tokens")
    wide = torch.randn(12, columns + 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = wide[:, :columns]  # rows that do not lie one after another
    logits[8, :], logits[9, 5], logits[10, 3], logits[11, 20:] = -torch.inf, torch.nan, torch.inf, -torch.inf
    rows = rows_of(
        12,
        temperature=[0, 1, 0.7, 1, 1e-300, 1.3, 0, 2, 1, 1, 1, 1],
        top_k=[5, 2**31, 5, 2**31, 9, 30, 2**31, 1, 3, 3, 3, 30],
        top_p=[1, 1, 1, 0.8, 1, 0.5, 0.3, 1, 1, 0.5, 0.5, 0.9],
        min_p=[0, 0.1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        seed=[2**62 + row for row in range(12)],
        position=list(range(12)),
    )
    peak, column = module.triton_peak(logits)
    expected, first = reference_peak(logits)
    torch.testing.assert_close(peak, expected, rtol=0, atol=0)
    assert torch.equal(column[:8], first[:8])
    cut, known = module.triton_cut(logits, rows, peak), reference_cut(logits, rows, peak)
    fine = [*range(8), 11]
    assert kept_mask(logits, rows, peak, cut)[fine].equal(kept_mask(logits, rows, peak, known)[fine])
    for chosen in (known, None):
        score, place = module.triton_best(logits, rows, peak, chosen, 0, columns)
        expected, first = reference_best(logits, rows, peak, chosen, 0, columns)
        torch.testing.assert_close(score[fine], expected[fine], rtol=1e-5, atol=1e-5)
        assert place[fine].equal(first[fine])


def test_columns_may_lie_on_several_ranks() -> None:
    logits = torch.randn(40, 21, generator=torch.Generator().manual_seed(1)).double()
    logits[3, 7] = torch.nan
    rows = rows_of(40, temperature=[0, 0.7] * 20, position=list(range(40)))._replace(filtered=False)
    expected = sample_tokens(logits, rows)
    assert expected[3] == FAILED
    peaks: list[Tensor] = []
    found: list[tuple[Tensor, Tensor]] = []

    def gather(own: Tensor) -> Tensor:
        peaks.append(own)
        return logits.nan_to_num(torch.inf).amax(-1)

    def column(own: Tensor, place: Tensor) -> Tensor:
        found.append((own, place))
        return place

    def combine(*given: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("log-probabilities are not asked for")

    for first in (0, 8, 16):
        sample_tokens(logits[:, first : first + 8], rows, ranks=VocabularyRanks(first, 21, gather, column, combine))
    scores, places = torch.stack([pair[0] for pair in found]), torch.stack([pair[1] for pair in found])
    best = places.gather(0, scores.argmax(0, keepdim=True))[0]
    assert torch.stack(peaks).amax(0).equal(logits.nan_to_num(torch.inf).amax(-1))
    fine = torch.arange(40) != 3
    assert best[fine].equal(expected[fine])
