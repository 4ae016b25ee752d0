"""MegatronPrecision: what Lightning's precision plugins become."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from megalight.errors import ConfigurationError
from megalight.plugins.precision import MegatronPrecision


@pytest.mark.parametrize(
    ("plugin", "precision", "dtype"),
    [
        (None, "32-true", torch.float32),
        (Precision(), "32-true", torch.float32),
        (DoublePrecision(), "64-true", torch.float64),
        (HalfPrecision("bf16-true"), "bf16-true", torch.bfloat16),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed", torch.bfloat16),
    ],
)
def test_lightnings_plugins_are_mapped(plugin: Precision | None, precision: str, dtype: torch.dtype) -> None:
    ours = MegatronPrecision.of(plugin)
    assert isinstance(ours, MegatronPrecision)
    assert (ours.precision, ours.dtype) == (precision, dtype)
    assert MegatronPrecision.of(ours) is ours


@pytest.mark.parametrize("precision", ["16-true", "transformer-engine", "fp8"])
def test_others_are_refused_with_the_list(precision: str) -> None:
    with pytest.raises(ConfigurationError, match="32-true, 64-true, bf16-true, bf16-mixed"):
        MegatronPrecision(precision)


def test_batches_of_our_modules_stay_as_they_are() -> None:
    batch = {"ids": torch.arange(3), "mask": torch.ones(3)}
    plugin = MegatronPrecision("bf16-true")
    assert plugin.convert_input(batch) is batch
    plugin.plain = True
    converted = plugin.convert_input(batch)
    assert (converted["ids"].dtype, converted["mask"].dtype) == (torch.int64, torch.bfloat16)


@pytest.mark.parametrize(
    ("precision", "product", "default"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.float32, torch.bfloat16),
        ("64-true", torch.float32, torch.float64),
    ],
)
def test_steps_of_plain_modules(precision: str, product: torch.dtype, default: torch.dtype) -> None:
    plugin = MegatronPrecision(precision)
    plugin.plain = True
    x = torch.ones(2, 2)
    with plugin.step_context():
        assert (x @ x).dtype == product
        assert torch.zeros(()).dtype == default
    assert torch.zeros(()).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_clipping_is_the_strategys() -> None:
    plugin, seen = MegatronPrecision(), []
    plugin.clip_by_norm = plugin.clip_by_value = seen.append
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    plugin.clip_gradients(optimizer, 0.5)
    plugin.clip_grad_by_value(optimizer, 2)
    plugin.clip_gradients(optimizer, 0.0)
    assert seen == [0.5, 2.0]
