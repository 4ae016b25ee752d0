"""The Triton kernels of mixture of experts, run by Triton's interpreter; see ``test_interpreted.py``."""

from __future__ import annotations

import importlib

import pytest
import torch

from megalight.ops.quantize import Scheme
from megalight.ops.router import Rule
from tests.ops import moe_checks
from tests.ops.test_interpreted import kernels
from tests.ops.test_interpreted import pytestmark as pytestmark

SMALL = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 16, "GROUP": 2, "num_warps": 4, "num_stages": 1}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ["one expert", "empty experts", "one token", "no tokens", "elsewhere"])
@pytest.mark.parametrize(("alignment", "capacity"), [(1, None), (16, None), (4, 8)])
def test_permutation(name: str, alignment: int, capacity: int | None) -> None:
    moe_checks.check_permutation(kernels("permute"), "cpu", name, alignment, capacity, torch.float32)


def test_tokens_wider_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("permute")
    monkeypatch.setattr(module, "BLOCK", 32)
    monkeypatch.setattr(module, "TILE", 1024)  # several blocks of pairs
    monkeypatch.setattr(module, "SCAN", {"ROWS": 4, "COLUMNS": 4})
    moe_checks.check_permutation(module, "cpu", "elsewhere", 4, None, torch.float32, size=40)


@pytest.mark.parametrize("rule", moe_checks.RULES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_route(rule: Rule, biased: bool) -> None:
    if biased and rule.score == "softmax" and not rule.pre_softmax:
        pytest.skip("there is nothing to add a bias to")
    for tokens in (70, 1, 0):
        moe_checks.check_route(kernels("router"), "cpu", rule, tokens, 16, biased)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("pools", "masked"), [(False, False), (True, True)])
def test_statistics(score: str, pools: bool, masked: bool) -> None:
    for tokens, experts in ((17, 6), (300, 16)):
        moe_checks.check_statistics(kernels("router"), "cpu", score, tokens, experts, pools, masked)


@pytest.mark.parametrize("kind", ["silu", "quick_gelu", "squared_relu", "gelu"])
@pytest.mark.parametrize("shape", [(3, 63), (2, 5, 300), (5, 2500)])
def test_weighted_activations(kind: str, shape: tuple[int, ...]) -> None:
    kernels("activation")
    module = importlib.import_module("megalight.ops.activation.triton")
    moe_checks.check_weighted(module, "cpu", torch.float32, shape, kind)


@pytest.mark.parametrize("sizes", moe_checks.GROUPS, ids=str)
@pytest.mark.parametrize("shape", [(24, 40), (64, 48), (40, 72)])
@pytest.mark.parametrize("tail", [0, 7])
def test_grouped_products(
    sizes: tuple[int, ...], shape: tuple[int, int], tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = kernels("grouped_linear")
    for name in ("PRODUCT", "FEW", "WGRAD", "PAIR"):
        monkeypatch.setattr(module, name, SMALL)
    moe_checks.check_grouped_product(module.product, "cpu", torch.float32, sizes, *shape, tail)
    dtypes = torch.float32, torch.float32
    moe_checks.check_grouped_weight_gradient(module.accumulate, "cpu", *dtypes, sizes, *shape, tail)


@pytest.mark.parametrize("sizes", [(5, 0, 17, 130), (0, 0), (33,), (16, 48, 16)], ids=str)
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_grouped_products_of_quantized_values(
    sizes: tuple[int, ...], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = kernels("grouped_scaled")
    for name in ("FAST", "EXACT"):
        monkeypatch.setattr(module, name, {**SMALL, "DEPTH": 128})
    monkeypatch.setattr(module, "CAST", {"TOKENS": 32, "FEATURES": 16, "num_warps": 4})
    for tail in (0, 7):
        moe_checks.check_scaled_products(module, sizes, 32, 48, tail, Scheme(form, (1, 0)))  # type: ignore[arg-type]
