"""Settings of sampling, and samples by them; :mod:`tests.ops.test_sample_tokens` has each filter."""

import numpy as np
import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.inference.sampling import FAILED, SamplingParams, sample

P = torch.tensor([[0.1, 0.5, 0.25, 0.15], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)


def drawn(rows: torch.Tensor, sampling_params: SamplingParams, seed: int = 3) -> list[int]:
    seeds = torch.full((len(rows),), seed)
    return sample(rows, sampling_params, seeds, torch.zeros(len(rows))).tolist()


def test_temperature_zero_is_greedy():
    assert drawn(P.log(), SamplingParams(temperature=0)) == [1, 0]
    assert drawn(P.log().half(), SamplingParams(temperature=1e-30)) == [1, 0]


def test_draws_follow_the_distribution():
    places = torch.arange(20000)
    draws = sample(P[:1].log().expand(20000, 4), SamplingParams(top_p=0.89), torch.full((20000,), 3), places)
    shares = draws.bincount(minlength=4) / len(draws)
    torch.testing.assert_close(shares, torch.tensor([0.0, 5 / 9, 2.5 / 9, 1.5 / 9]), atol=0.015, rtol=0)


def test_a_sample_follows_from_its_row_its_seed_and_its_position():
    state = torch.get_rng_state()
    rows, seeds, places = P[:1].log().expand(50, 4), torch.arange(50), torch.arange(50) // 2
    found = sample(rows, SamplingParams(), seeds, places)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:20]
    assert torch.equal(sample(rows[order], SamplingParams(), seeds[order], places[order]), found[order])
    assert len({*found.tolist()}) == 4
    assert torch.equal(state, torch.get_rng_state())


def test_rows_that_are_not_finite_have_no_sample():
    bad = torch.full((3, 4), -torch.inf, dtype=torch.float64)
    bad[0], bad[1, 2], bad[2, 1] = torch.nan, torch.inf, torch.nan
    for sampling_params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=2, top_p=0.5)):
        alone = [drawn(P[row : row + 1].log(), sampling_params, row)[0] for row in range(2)]
        seeds, rows = torch.tensor([0, 7, 8, 9, 1]), torch.cat([P[:1].log(), bad, P[1:].log()])
        found = sample(rows, sampling_params, seeds, torch.zeros(5))
        assert found.tolist() == [alone[0], FAILED, FAILED, FAILED, alone[1]]
    # Without a probability, but with others beside it, a token is only never sampled.
    assert drawn(torch.tensor([[0.0, -torch.inf]]), SamplingParams()) == [0]


def test_temperatures_beyond_float32_are_as_its_smallest_and_its_largest():
    rows = P.log().float()
    assert drawn(rows, SamplingParams(temperature=1e-300)) == [1, 0]
    seeds = torch.arange(4000)
    flat = sample(rows[1:].expand(4000, 4), SamplingParams(temperature=1e300), seeds, torch.zeros(4000))
    torch.testing.assert_close(flat.bincount() / 4000, torch.full((4,), 0.25), atol=0.03, rtol=0)


def test_scalars_of_numpy_and_torch_are_numbers():
    found = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), top_p=torch.tensor(0.25))  # type: ignore[arg-type]
    assert (found, hash(found)) == (given := SamplingParams(temperature=0.5, top_k=3, top_p=0.25), hash(given))


@pytest.mark.parametrize(
    "bad",
    [
        *[
            {"temperature": value}
            for value in (-1.0, float("nan"), float("inf"), True, np.True_, torch.tensor(True), "1", None, [1.0])
        ],
        *[{"top_k": value} for value in (0, 1.5, True, torch.tensor(True), "3", 2**63)],
        *[{"top_p": value} for value in (0.0, 1.1, float("nan"), True, "0.5")],
        *[{"min_p": value} for value in (-0.1, 1.1, float("nan"), True, None)],
        *[{"repetition_penalty": value} for value in (0, -1.0, 1e308, float("inf"), "1", None)],
        *[{"presence_penalty": value} for value in (1e308, float("inf"), float("nan"), True, None)],
        *[{"frequency_penalty": value} for value in (-float("inf"), "2", None)],
        *[{"min_new_tokens": value} for value in (-1, 1.5, True, None)],
    ],
)
def test_values_out_of_range_are_refused(bad):
    with pytest.raises(ConfigurationError, match=f"{next(iter(bad))} is .* must be"):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ([1], r"logit_bias is \[1\]; it must be numbers by token id"),
        ({-1: 0.0}, "token id of logit_bias is -1; it must be at least 0"),
        ({"a": 0.0}, "token id of logit_bias is 'a'; it must be an integer"),
        *[
            ({3: value}, r"logit_bias\[3\] is .*; it must be a number from -1e30 to 1e30, or -inf")
            for value in (1e308, torch.inf, "1", True, np.True_)
        ],
    ],
)
def test_biases_that_are_none_are_refused(bias, message):
    with pytest.raises(ConfigurationError, match=message):
        SamplingParams(logit_bias=bias)
