"""Casts, against tables and loops that are written from the formats' definitions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError, ConfigurationError
from megalight.ops.linear import linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize import Quantized, Scheme, amax_of, cast, quantize, rotate
from megalight.ops.quantize.amax_history import annotate_amax, known_amax, rows_of
from megalight.ops.quantize.formats import (
    DTYPES,
    E2M1,
    LARGEST,
    e8m0_value,
    pack_e2m1,
    power_below,
    to_e2m1,
    to_e2m1_stochastic,
    to_e8m0,
    to_fp8,
    unpack_e2m1,
)
from megalight.ops.quantize.recipes import RECIPES, recipe

BITS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
"""Exponent bits, mantissa bits, bias."""
SPECIAL = {"e4m3": {0x7F: math.nan}, "e5m2": {0x7C: math.inf, 0x7D: math.nan, 0x7E: math.nan, 0x7F: math.nan}}


def positive_values(name: str) -> list[float]:
    """The value of each code without sign, from the definition."""
    exponent_bits, mantissa_bits, bias = BITS[name]
    found = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        value = 2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)
        found.append(SPECIAL.get(name, {}).get(code, value))
    return found


def nearest_code(x: float, name: str) -> int:
    """By search: the nearest finite value, of two the even code; saturating."""
    values = positive_values(name)
    sign = 2 ** sum(BITS[name][:2]) if math.copysign(1, x) < 0 else 0
    finite = [code for code, value in enumerate(values) if math.isfinite(value)]
    return sign + min(finite, key=lambda code: (abs(values[code] - min(abs(x), values[finite[-1]])), code % 2))


def awkward(name: str) -> list[float]:
    """Every value, every tie, what is just beside them, zeros, and what is too large."""
    values = [value for value in positive_values(name) if math.isfinite(value)]
    ties = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    beside = [float(np.nextafter(np.float32(t), np.float32(to))) for t in ties for to in (0, 1e9)]
    large = [values[-1] * 1.01, values[-1] * 1.04, values[-1] * 1.0625, values[-1] * 1.2, 1e30, math.inf]
    positive = [*values, *ties, *beside, *large, values[1] / 2.001, 1e-30]
    return positive + [-x for x in positive]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_torch_means_the_same_quantized_values(name: str) -> None:
    half = torch.arange(128, dtype=torch.uint8).view(DTYPES[name]).double()
    assert torch.allclose(half, torch.tensor(positive_values(name), dtype=torch.float64), 0, 0, equal_nan=True)
    assert max(value for value in positive_values(name) if math.isfinite(value)) == LARGEST[name]


def test_e2m1_table() -> None:
    assert positive_values("e2m1") == list(E2M1)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bits(name: Any) -> None:
    inputs = awkward(name)
    data = to_fp8(torch.tensor(inputs), name).view(torch.uint8).tolist()
    assert data == [nearest_code(x, name) for x in inputs]
    assert bool(to_fp8(torch.tensor([math.nan]), name).float().isnan())


def test_four_bits() -> None:
    inputs = awkward("e2m1")
    assert to_e2m1(torch.tensor(inputs)).tolist() == [nearest_code(x, "e2m1") for x in inputs]


def test_two_quantized_values_share_a_byte_the_first_in_the_low_bits() -> None:
    data = torch.arange(16, dtype=torch.uint8)
    packed = pack_e2m1(data)
    assert packed.dtype == torch.float4_e2m1fn_x2
    assert packed.view(torch.uint8)[:2].tolist() == [0x10, 0x32]
    assert unpack_e2m1(packed).tolist() == [*E2M1, *(-value for value in E2M1)]


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    x = torch.tensor([0.0, 0.1, 0.5, 0.7, -2.2, 3.9, 5.5, -6.0, 7.0]).repeat(20000, 1)
    generator = torch.Generator().manual_seed(1)
    data = to_e2m1_stochastic(x, torch.rand(x.shape, generator=generator))
    values = unpack_e2m1(pack_e2m1(torch.stack([data, data], -1)))[..., 0]
    expected = x[0].clamp(-6, 6)
    assert torch.allclose(values.mean(0), expected, atol=0.03)
    for column, one in zip(values.T, expected, strict=True):  # neighbors alone, and exact values always
        below = max(value for value in E2M1 if value <= abs(one) + 1e-6)
        above = min(value for value in E2M1 if value >= abs(one) - 1e-6)
        assert set(column.abs().tolist()) <= {below, above}


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0.0, 0),
        (2.0**-140, 0),
        (2.0**-127, 0),
        (1.0, 127),
        (1.0000001, 128),
        (1.5, 128),
        (2.0, 128),
        (2.0**127, 254),
        (3e38, 254),
        (math.inf, 255),
        (math.nan, 255),
    ],
)
def test_powers_of_two_as_scales(x: float, code: int) -> None:
    scale = to_e8m0(torch.tensor([x]))
    assert scale.view(torch.uint8).tolist() == [code]
    value = float(e8m0_value(scale))
    assert value == 2.0 ** (code - 127) if code < 255 else math.isnan(value)


def test_the_power_below() -> None:
    x = torch.tensor([1.0, 1.9999999, 2.0, 3e-30, 448e30, math.inf])
    expected = [1.0, 1.0, 2.0, 2.0 ** math.floor(math.log2(3e-30)), 2.0 ** math.floor(math.log2(448e30)), math.inf]
    assert power_below(x).tolist() == pytest.approx(expected, rel=0)


def by_loops(x: Tensor, scheme: Scheme) -> np.ndarray[Any, Any]:
    """What a cast should stand for, tile by tile, in numpy's float32."""
    values = x.float().numpy()
    out = np.zeros(values.shape)
    height, width = (size or length for size, length in zip(scheme.tile, values.shape, strict=True))
    largest = np.float32(LARGEST[scheme.format])
    table = positive_values(scheme.format)
    total = np.float32(np.abs(values).max())
    for top, left in itertools.product(range(0, values.shape[0], height), range(0, values.shape[1], width)):
        tile = values[top : top + height, left : left + width]
        amax = np.float32(np.abs(tile).max())
        if amax == 0:
            continue
        if scheme.scale == "e8m0":
            step = 2.0 ** math.ceil(math.log2(float(amax / largest)))
            factor: Any = 1 / step
        elif scheme.scale == "e4m3":
            encode = np.float32(448 * 6) / total
            block = np.float32(table_value(nearest_code(float(amax / np.float32(6) * encode), "e4m3"), "e4m3"))
            step = float(block) * float(np.float32(1) / encode)
            factor = np.float32(1) / (block * (np.float32(1) / encode))
        else:
            factor = largest / amax
            if scheme.scale == "power":
                factor = np.float32(2.0 ** math.floor(math.log2(float(factor))))
            step = float(np.float32(1) / factor)
        for row, column in itertools.product(*map(range, tile.shape)):
            code = nearest_code(float(np.float32(tile[row, column] * factor)), scheme.format)
            out[top + row, left + column] = table_value(code, scheme.format, table) * step
    return out


def table_value(code: int, name: str, table: list[float] | None = None) -> float:
    table = table or positive_values(name)
    return -table[code - len(table)] if code >= len(table) else table[code]


SCHEMES = [
    *(
        Scheme(form, tile, scale)
        for form in ("e4m3", "e5m2")
        for tile in ((0, 0), (1, 0))
        for scale in ("fp32", "power")
    ),
    Scheme("e4m3", (1, 128)),
    Scheme("e4m3", (128, 128), "power"),
    Scheme("e4m3", (1, 32), "e8m0"),
    Scheme("e5m2", (1, 32), "e8m0"),
    Scheme("e2m1", (1, 32), "e8m0"),
    Scheme("e2m1", (1, 16), "e4m3"),
    Scheme("e2m1", (16, 16), "e4m3"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_tile_by_tile(scheme: Scheme) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(18, 144, generator=generator) * torch.logspace(-4, 2, 18)[:, None]
    x[16:] = 0
    x[:, 32:64] = 0
    found = quantize(x.bfloat16(), scheme)
    assert found.shape == (18, 144)
    assert np.array_equal(found.dequantize().numpy(), by_loops(x.bfloat16(), scheme))


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_stay_zero_and_nan_is_seen(name: str) -> None:
    schemes = recipe(name)
    generator = torch.Generator().manual_seed(0)
    for scheme in (schemes.x, schemes.weight, schemes.gradient):
        assert bool((quantize(torch.zeros(32, 32), scheme, generator=generator).dequantize() == 0).all())
        x = torch.ones(32, 32)
        x[3, 4] = math.nan
        assert bool(quantize(x, scheme, generator=generator).dequantize()[3, 4].isnan())


def test_a_given_amax_saturates_what_is_beyond() -> None:
    x = torch.tensor([[1.0, -3.0, 0.5]])
    found = quantize(x, Scheme("e4m3"), amax=torch.tensor(1.0)).dequantize()
    assert torch.allclose(found, torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64), rtol=1e-6)


def test_the_transpose_is_padded_with_zeros() -> None:
    x = torch.randn(19, 48)
    for scheme, tokens in (
        (Scheme("e4m3"), 32),
        (Scheme("e4m3", (1, 32), "e8m0"), 32),
        (Scheme("e2m1", (1, 16), "e4m3"), 32),
    ):
        rows, columns = cast(x, scheme, scheme)
        assert isinstance(rows, Quantized)
        assert isinstance(columns, Quantized)
        assert columns.shape == (48, tokens)
        values = columns.dequantize()
        assert bool((values[:, 19:] == 0).all())
        if scheme.tile == (0, 0):
            assert torch.equal(values[:, :19], rows.dequantize().T)
    assert cast(x, None, None) == (None, None)


def test_rotation_keeps_products_and_spreads_outliers() -> None:
    a, b = torch.randn(5, 64), torch.randn(7, 64)
    assert torch.allclose(rotate(a) @ rotate(b).T, a @ b.T, atol=1e-4)
    spike = torch.zeros(1, 16)
    spike[0, 3] = 16.0
    assert torch.allclose(rotate(spike).abs(), torch.full((1, 16), 4.0))


def test_kernels_say_what_they_cannot_do() -> None:
    with pytest.raises(BackendError, match="tiles"):
        cast(torch.zeros(16, 16), Scheme("e2m1", (1, 16), "e4m3"), None, backend="triton")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("tensorwize",), "Did you mean 'tensorwise'"),
        (("rowwise", "hybrid"), "e4m3"),
        (("tensorwise", "e5m2"), "'hybrid' or 'e4m3'"),
        (("nvfp4", "e4m3"), "its own format"),
        (("mxfp8", None, True), "its own kind of scales"),
    ],
)
def test_recipes_that_do_not_exist(arguments: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        recipe(*arguments)


def test_what_was_told_of_a_tensor_counts_until_it_changes() -> None:
    x = torch.randn(2, 3, 16)
    annotate_amax(x, torch.tensor([3.0, 7.0]))
    assert known_amax(x) == 7
    assert known_amax(rows_of(x)) == 7
    for other in (x.clone(), x + 0, x.detach()):
        assert torch.equal(known_amax(other), amax_of(other))
    x[0, 0, 0] = 9
    assert known_amax(x) == 9
    assert known_amax(rows_of(x)) == 9


def test_casts_go_by_what_was_told() -> None:
    weight = torch.nn.Parameter(torch.randn(32, 48))
    state_of(weight).precision = LowPrecision(recipe("tensorwise"), Session(), emulate=True)
    x = torch.randn(16, 48)
    expected = linear(x, weight)
    assert torch.equal(linear(annotate_amax(x.clone(), amax_of(x)[None]), weight), expected)
    assert not torch.equal(linear(annotate_amax(x.clone(), torch.tensor([20.0])), weight), expected)
