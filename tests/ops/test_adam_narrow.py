"""Moments of Adam in 16 and 8 bits: what they round to, and that no backend rounds otherwise."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops import adam
from megalight.ops.adam import (
    adam_step,
    chunked_adam_step,
    decode_moment,
    encode_moment,
    exponents_like,
    half_moment,
    read_moment,
    reference_adam_step,
    write_moment,
)
from tests.ops.checks import check_narrow_adam, error

SECOND = pytest.mark.parametrize("second", [False, True])


def _values(second: bool, count: int = 1000) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 0, count)
    values[70:90] = 0
    return values.abs() if second else values


def _encoded(values: Tensor, second: bool, step: float | None) -> tuple[Tensor, Tensor]:
    data = torch.full(values.shape, 99, dtype=torch.uint8)
    exponents = exponents_like(data)
    encode_moment(values, data, exponents, second, step)
    return data, exponents


@SECOND
def test_quantized_values_have_three_bits_of_mantissa(second: bool) -> None:
    values = _values(second)
    found = decode_moment(*_encoded(values, second, None), second)
    root = (found.sqrt(), values.sqrt()) if second else (found, values)
    assert ((root[0] - root[1]).abs() <= root[1].abs() / 16).all()
    assert torch.equal(found[70:90], torch.zeros(20))


@SECOND
def test_bfloat16_holds_quantized_values_and_coding_them_again_changes_nothing(second: bool) -> None:
    for step in (None, *range(20)):
        found = decode_moment(*_encoded(_values(second), second, step), second)
        assert torch.equal(found.bfloat16().float(), found)
        for again in (None, 5):
            assert torch.equal(decode_moment(*_encoded(found.bfloat16(), second, again), second), found)


@SECOND
def test_quantized_values_are_right_on_average(second: bool) -> None:
    values, rounds = _values(second)[90:], 500
    total = torch.zeros_like(values)
    for step in range(rounds):
        found = decode_moment(*_encoded(values, second, step), second)
        total += found.sqrt() if second else found
    wanted = values.sqrt() if second else values
    assert ((total / rounds - wanted).abs() <= 2e-3 * wanted.abs()).all()


def test_bfloat16_is_right_on_average() -> None:
    values, rounds = _values(False)[90:], 500
    mean = sum(half_moment(values, step).float() for step in range(rounds)) / rounds
    assert ((mean - values).abs() <= 2e-4 * values.abs()).all()
    assert torch.equal(half_moment(values, None), values.bfloat16())


def test_a_second_moment_is_never_rounded_to_nothing() -> None:
    values = torch.ones(64)
    values[1], values[2] = 1e-30, 0
    found = decode_moment(*_encoded(values, True, 1), True)
    assert found[1] > 0
    assert found[2] == 0


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@SECOND
def test_what_is_not_finite_stays_so(value: float, second: bool) -> None:
    values = torch.ones(64)
    values[3] = value
    assert not decode_moment(*_encoded(values, second, 1), second)[3].isfinite()


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("kind", ["bfloat16", "float8"])
def test_second_moments_follow_gradients_that_shrink(kind: str, beta2: float) -> None:
    """0.999 of a bfloat16 rounds back to all of it. Rounded at random, the mean of many falls as it should."""
    param, moment = torch.zeros(4096), torch.zeros(4096)
    exact = torch.ones(4096)
    data = torch.zeros(4096, dtype=torch.uint8 if kind == "float8" else torch.bfloat16)
    exponents = exponents_like(data) if kind == "float8" else None
    write_moment(data, exponents, exact, True)
    for step in range(1, 201):
        options: dict[str, Any] = {"lr": 0.0, "beta1": 0.9, "beta2": beta2, "eps": 1e-8, "weight_decay": 0.0}
        grad = 0.3 + 0.1 * torch.rand(4096, generator=torch.Generator().manual_seed(step))
        adam_step(param, grad, moment, data, step=step, exponents=(None, exponents), **options)
        exact = beta2 * exact + (1 - beta2) * grad.square()
    found = read_moment(data, exponents, True).float().sqrt().mean()
    assert abs(found / exact.sqrt().mean() - 1) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("first", "second"), list(product(("float32", "bfloat16", "float8"), repeat=2)))
def test_pieces_equal_the_reference(
    first: str, second: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "SHARE", 128)
    check_narrow_adam(chunked_adam_step, "cpu", 1003, first, second, dtype=dtype)


def test_quantized_values_go_to_a_backend_that_serves_them() -> None:
    n, options = 70, {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    data = torch.zeros(2, n, dtype=torch.uint8)
    exponents = exponents_like(data[0]), exponents_like(data[1])
    with pytest.raises(BackendError, match="torch: needs gradients and moments in the dtype of the parameters"):
        adam_step(torch.zeros(n), torch.ones(n), *data, exponents=exponents, **options, backend="torch")  # type: ignore[arg-type]
    ours, theirs = torch.zeros(n), torch.zeros(n)
    adam_step(ours, torch.ones(n), *data, exponents=exponents, **options)  # type: ignore[arg-type]
    moments = torch.zeros(2, n)
    reference_adam_step(theirs, torch.ones(n), *moments, **options)  # type: ignore[arg-type]
    assert error(ours, theirs) < 1e-6  # the update comes before the moments are rounded
