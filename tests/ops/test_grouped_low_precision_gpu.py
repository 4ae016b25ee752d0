"""Grouped products in 8 bits on a GPU: the device's products beside emulated ones, with the same casts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalight.ops.grouped_linear import grouped_linear, low_precision_stacks
from megalight.ops.grouped_linear.low_precision import OneByOne
from megalight.ops.grouped_linear.low_precision_stacks import Together
from megalight.ops.grouped_scaled import LINE, columns_of_groups, columns_of_stack
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize import Scheme
from megalight.ops.quantize.recipes import recipe
from tests.ops.checks import error
from tests.ops.test_linear import with_main_grad

pytestmark = pytest.mark.gpu

SIZES, IN, OUT = (640, 0, 37, 256), 512, 384


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")


def products(name: str, way: str, known: bool, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    """Outputs and gradients over two steps: ``delayed`` scales the second one by the first."""
    session, total = Session(), sum(sizes)
    draws = torch.Generator("cuda").manual_seed(3)
    values = [
        torch.randn(shape, generator=draws, device="cuda").bfloat16()
        for shape in ((len(sizes), OUT, IN), (total + 5, IN), (total + 5, OUT))
    ]
    weight, x = with_main_grad(values[0], torch.float32), values[1].requires_grad_()
    values[2][total:] = torch.nan  # rows after the last group
    if way == "one by one":
        state_of(weight).stack_precision = OneByOne([LowPrecision(recipe(name), session) for _ in sizes])
    else:
        state_of(weight).stack_precision = Together(recipe(name), session, count=len(sizes), emulate=way == "emulated")
    offsets = torch.tensor(sizes).cumsum(0).int().cuda()
    found = []
    for number in range(2):
        weight.main_grad.fill_(torch.nan)
        state_of(weight).untouched = True
        with session.step(number):
            for _ in range(2):  # written, then added
                x.grad = None
                y = grouped_linear(x, weight, offsets, sizes if known else None)
                y.backward(values[2])
        assert x.grad is not None
        found += [y.detach()[:total], x.grad[:total], weight.main_grad.clone()]
    return found


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("way", ["together", "one by one", "cast together"])
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise"])
def test_products_of_the_device_equal_emulated_ones(
    name: str, way: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "cast together":  # all experts are large then, and run one by one where their rows are known
        monkeypatch.setattr(low_precision_stacks, "LARGE_ONE_SCALE", 0.0)
        monkeypatch.setattr(low_precision_stacks, "LARGE", 0.0)
    for found, expected in zip(products(name, way, known), products(name, "emulated", known), strict=True):
        assert error(found, expected) < 1e-2


def test_all_rows_at_one_expert_and_none() -> None:
    for sizes in ((0, 1500, 0, 0), (0, 0, 0, 0)):
        found_by = [products("tensorwise", way, True, sizes) for way in ("together", "emulated")]
        pairs = zip(*found_by, strict=True)
        assert all(error(found, expected) < 1e-2 for found, expected in pairs if expected.numel() and expected.any())
    assert not bool(found_by[0][2].any())  # written with zeros


@pytest.mark.parametrize("scale", ["fp32", "power"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_casts_equal_the_reference(name: str, scale: str) -> None:
    """Bit for bit, where there are groups."""
    scheme, offsets = Scheme(name, LINE, scale), torch.tensor(SIZES).cumsum(0).int().cuda()  # type: ignore[arg-type]
    x, stack = torch.randn(sum(SIZES) + 5, IN).cuda().bfloat16(), torch.randn(3, OUT, IN).cuda().bfloat16()
    amax = torch.rand(len(SIZES), IN, device="cuda")
    filled = sum(-(-size // 128) * 128 for size in SIZES)
    for given in (None, amax):
        one, other = (columns_of_groups(x, scheme, offsets, given, backend) for backend in ("triton", "reference"))
        assert torch.equal(one.scale, other.scale)
        quantized = [cast.data[:, :filled].view(torch.uint8) for cast in (one, other)]
        assert torch.equal(*quantized)
    one, other = (columns_of_stack(stack, scheme, None, backend) for backend in ("triton", "reference"))
    assert torch.equal(one.scale, other.scale)
    assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))


def test_the_host_does_not_wait() -> None:
    session = Session()
    weight = with_main_grad(torch.randn(len(SIZES), OUT, IN, device="cuda").bfloat16(), torch.float32)
    state_of(weight).stack_precision = Together(recipe("delayed"), session, count=len(SIZES))
    offsets = torch.tensor(SIZES).cumsum(0).int().cuda()
    x = torch.randn(sum(SIZES), IN, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(sum(SIZES), OUT, device="cuda").bfloat16()
    for number in range(2):
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            with session.step(number):
                grouped_linear(x, weight, offsets).backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
