"""Linear layers in 8 and 4 bits, against float64 products of what their casts stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalight.errors import BackendError
from megalight.ops.autograd import RecomputeRecipe, attach_recipe
from megalight.ops.linear import WeightGradients, deferring, linear
from megalight.ops.linear.low_precision import LowPrecision, Session, precision_of
from megalight.ops.parameter import release, state_of
from megalight.ops.quantize import Scheme, cast, quantize
from megalight.ops.quantize.amax_history import AmaxHistory
from megalight.ops.quantize.recipes import RECIPES, recipe
from megalight.ops.scaled_mm import SCALED_MM, ScaledMatmulSpec, scaled_mm, trial
from megalight.registry import choose
from tests.ops.checks import error
from tests.ops.test_linear import Parameter, with_main_grad

TOKENS, IN, OUT = 37, 96, 64
BOUND = {"nvfp4": 0.25}
"""Relative error beside an exact product; 0.08 for all others."""


def make(name: str, session: Session | None = None, seed: int = 0, **options: Any) -> tuple[Parameter, Tensor, Tensor]:
    """A weight with its precision, an input, and a gradient of the output; all float64, as other tests compare them."""
    generator = torch.Generator().manual_seed(seed)
    data, x, grad_y = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((OUT, IN), (TOKENS, IN), (TOKENS, OUT))
    )
    weight = with_main_grad(data)
    schemes = recipe(name)
    state_of(weight).precision = LowPrecision(schemes, session or Session(), emulate=True, **options)
    return weight, x.requires_grad_(), grad_y


def values(x: Tensor, scheme: Scheme, transpose: bool = False, generator: torch.Generator | None = None) -> Tensor:
    """What ``x``, or its transpose padded to tiles, is cast to."""
    if transpose:
        x = torch.nn.functional.pad(x.T, (0, -len(x) % scheme.multiple))
    return quantize(x.detach(), scheme, generator=generator).dequantize()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("leading", [(TOKENS,), (1, TOKENS)])
def test_products_are_those_of_the_casts(name: str, leading: tuple[int, ...]) -> None:
    session = Session(seed=5)
    weight, x, grad_y = make(name, session)
    schemes = recipe(name)
    bias = with_main_grad(torch.randn(OUT, dtype=torch.float64))
    with session.step(11):
        y = linear(x.view(*leading, IN), weight, bias)
        y.backward(grad_y.view(*leading, OUT))
    generator = torch.Generator().manual_seed(5 * 1_000_003 + 11)
    gradient = values(grad_y, schemes.gradient, generator=generator)
    gradient_t = values(grad_y, schemes.gradient_t, True, generator)
    expected = values(x, schemes.x) @ values(weight, schemes.weight).T + bias.detach()
    assert error(y.view(TOKENS, OUT), expected) < 1e-14
    assert x.grad is not None
    weight_t = quantize(weight.detach().T, schemes.weight_t).dequantize()
    assert error(x.grad, gradient @ weight_t.T) < 1e-14
    assert error(weight.main_grad, gradient_t @ values(x, schemes.x_t, True).T) < 1e-14
    assert error(bias.main_grad, grad_y.sum(0)) < 1e-14
    bound = BOUND.get(name, 0.08)
    assert 1e-3 < error(y.view(TOKENS, OUT), x @ weight.T + bias) < bound
    assert 1e-3 < error(x.grad, grad_y @ weight) < bound
    assert 1e-3 < error(weight.main_grad, grad_y.T @ x) < bound


@pytest.mark.parametrize("name", RECIPES)
def test_a_product_and_its_bias_are_rounded_once(name: str) -> None:
    session = Session()
    weight, x, _ = make(name, session)
    bias = torch.nn.Parameter(torch.linspace(-300.0, 300.0, OUT).bfloat16())
    half = x.detach().bfloat16()
    with session.step(0):
        y = linear(half, weight, bias)
    schemes = recipe(name)
    exact = values(half, schemes.x) @ values(weight, schemes.weight).T + bias.detach()
    assert torch.equal(y, exact.bfloat16())
    assert not torch.equal(y, (exact - bias.detach()).bfloat16() + bias.detach())  # what two roundings give


def test_without_main_gradients_autograd_gets_them() -> None:
    weight, x, grad_y = make("tensorwise")
    linear(x, weight).backward(grad_y)
    expected = weight.main_grad.clone()
    x.grad = None
    release(weight)
    linear(x, weight).backward(grad_y)
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def test_deferred_weight_gradients() -> None:
    weight, x, grad_y = make("rowwise")
    linear(x, weight).backward(grad_y)
    expected = weight.main_grad.clone()
    weight.main_grad.zero_()
    queue = WeightGradients()
    with deferring(queue):
        linear(x, weight).backward(grad_y)
    assert bool((weight.main_grad == 0).all())
    queue.run()
    assert torch.equal(weight.main_grad, expected)
    assert weight.ready == 2


def test_recomputed_inputs_and_regions() -> None:
    weight, x, grad_y = make("tensorwise")
    linear(x.sin(), weight).backward(grad_y)
    expected = x.grad, weight.main_grad.clone()
    for again in (
        lambda: linear(attach_recipe(x.sin(), RecomputeRecipe(torch.sin, (x,), lambda: None)), weight),
        lambda: checkpoint(lambda x: linear(x.sin(), weight), x, use_reentrant=False),
    ):
        x.grad = None
        weight.main_grad.zero_()
        again().backward(grad_y)
        assert torch.equal(x.grad, expected[0])
        assert torch.equal(weight.main_grad, expected[1])


@pytest.mark.parametrize(("name", "bits"), [("tensorwise", 8), ("blockwise", 8), ("nvfp4", 4)])
def test_the_cast_of_an_input_is_saved(name: str, bits: int) -> None:
    weight, x, _ = make(name)
    weight.data = weight.data.bfloat16()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = linear(x.detach().bfloat16().requires_grad_(), weight)
    assert y.dtype == torch.bfloat16
    padded = TOKENS + -TOKENS % 16
    assert max(tensor.nbytes for tensor in saved) == IN * padded * bits // 8
    saved.clear()
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(x, weight)
    assert not saved


def test_layers_that_share_a_gradient() -> None:
    """A sum hands the very same tensor to both; each scales it by its own history."""
    session = Session()
    one, x, grad_y = make("delayed", session)
    other, _, _ = make("delayed", session)
    with session.step(0):
        linear(x, one).backward(grad_y * 100)
    with session.step(1):
        (linear(x, one) + linear(x, other)).backward(grad_y)
    assert error(other.main_grad, grad_y.T @ x) < 0.08
    assert precision_of(one).history.past[0, 2] == precision_of(other).history.past[0, 2]


def test_a_weight_is_cast_once_in_a_step() -> None:
    session = Session()
    weight, x, _ = make("tensorwise", session)
    with session.step(0):
        first = linear(x, weight)
        weight.data.mul_(2)  # nobody may: to show that the cast is kept
        assert torch.equal(linear(x, weight), first)
    assert torch.equal(linear(x, weight), 2 * first)
    weight.data.mul_(0.5)
    assert torch.equal(linear(x, weight), first)  # outside steps nothing is kept
    with session.step(1):
        assert torch.equal(linear(x, weight), first)


def test_an_error_in_a_step_leaves_no_casts() -> None:
    session = Session()
    weight, x, _ = make("tensorwise", session)

    def broken_step() -> None:
        with session.step(0):
            first.append(linear(x, weight))
            raise RuntimeError("broken")

    first: list[Tensor] = []
    with pytest.raises(RuntimeError, match="broken"):
        broken_step()
    weight.data.mul_(2)
    assert torch.equal(linear(x, weight), 2 * first[0])


def test_delayed_scales_follow_the_largest_of_past_steps() -> None:
    session = Session()
    weight, x, _ = make("delayed", session, history=2)
    history = precision_of(weight).history
    x = x.detach()
    sizes = []
    for step, size in enumerate([1.0, 8.0, 1.0, 1.0, 1.0]):
        with session.step(step):
            for part in (0.5, 1.0):  # two micro-batches
                rows = precision_of(weight)._amax(size * part * x, recipe("delayed").x, 0, None)
        sizes.append(float(rows / x.abs().max()))
    # its own at first, then one step late, and as long as the history remembers
    assert sizes == pytest.approx([1.0, 1.0, 8.0, 8.0, 1.0], rel=1e-6)
    before = history.past.clone()
    linear(100 * x, weight)  # evaluation leaves no trace
    with session.step(9):
        pass
    assert torch.equal(history.past, before[:1].expand_as(before))


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_history_of_another_length_is_restored(length: int) -> None:
    saved, history = torch.tensor([[4.0, 1, 0], [2.0, 6, 0], [8.0, 3, 0]]), AmaxHistory(length)
    history.place(saved.device)
    memory = history.past
    history.restore(saved)
    assert history.past is memory
    assert torch.equal(history.past[:3], saved[:length])
    assert not history.past[3:].any()
    assert history.rolled


def test_delayed_casts_go_by_past_steps_alone() -> None:
    """Values beyond what past steps had saturate, this step's are remembered, and zeros before are no scale."""
    session = Session()
    weight, x, grad_y = make("delayed", session, history=2, margin=1)
    history = precision_of(weight).history
    with session.step(0):
        linear(x, weight).backward(torch.zeros_like(grad_y))
    largest = x.detach().abs().max().float()
    assert history.past[0].tolist() == [largest, weight.detach().abs().max().float(), 0]
    with session.step(1):
        y = linear(8 * x, weight)
        y.backward(grad_y)
    rows = quantize(8 * x.detach(), recipe("delayed").x, 2 * largest).dequantize()
    quantized = quantize(weight.detach(), recipe("delayed").weight, 2 * history.past[1, 1]).dequantize()
    assert error(y, rows @ quantized.T) < 1e-14
    assert history.past[0, 0] == 8 * largest
    assert history.past[0, 2] == grad_y.abs().max().float()
    gradient = quantize(grad_y, recipe("delayed").gradient, torch.tensor(2 * 57344.0)).dequantize()
    assert error(x.grad - 0, gradient @ quantized * 8) < 1e-14  # type: ignore[operator]
    before = history.past.clone()
    linear(100 * x, weight)  # evaluation leaves no trace
    with session.step(2):
        pass
    assert torch.equal(history.past[1], before[0])


@pytest.mark.parametrize("history", [1, 4])
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_spoils_no_later_step(history: int, where: str, bad: float) -> None:
    reduced: list[Tensor] = []
    session = Session()
    weight, x, grad_y = make(
        "delayed", session, history=history, reduce_history=lambda seen: reduced.append(seen.clone())
    )
    found = []
    for step in range(3):
        leaf, gradient = x.detach().clone(), 1e-7 * grad_y
        if step == 1:
            (leaf if where == "input" else gradient)[3, 5] = bad
        with session.step(step):
            y = linear(leaf.requires_grad_(), weight)
            y.backward(gradient)
        found.append((y.detach(), leaf.grad))
    assert torch.stack(reduced).isfinite().all()
    for first, last in zip(found[0], found[2], strict=True):
        assert first is not None
        assert last is not None
        assert torch.equal(first, last)


def test_steps_without_rows_are_no_magnitudes() -> None:
    """An expert that got no tokens for longer than the history casts as before; with a scale of 1, gradients vanish."""
    session, found = Session(), []
    weight, x, grad_y = make("delayed", session, history=2)
    for step in range(5):
        with session.step(step):
            if step in (0, 4):
                leaf = x.detach().clone().requires_grad_()
                linear(leaf, weight).backward(1e-7 * grad_y)
                found.append(leaf.grad)
    first, last = found
    assert first is not None
    assert last is not None
    assert bool(first.any())
    assert torch.equal(first, last)


def test_histories_are_reduced_once_for_all_layers_of_a_group() -> None:
    calls: list[Tensor] = []

    def reduce(amax: Tensor) -> None:
        calls.append(amax.clone())
        amax.mul_(4)

    session = Session()
    reduces = (reduce, None, reduce)
    weights = [make("delayed", session, seed=seed, reduce_history=reduces[seed])[0] for seed in range(3)]
    x = torch.ones(3, IN, dtype=torch.float64)
    with session.step(0):
        for weight in weights:
            linear(x, weight)
    assert [call.shape for call in calls] == [(2, 3)]
    for weight, factor in zip(weights, (4, 1, 4), strict=True):
        past = precision_of(weight).history.past
        assert past[0, 0] == factor
        assert past[0, 1] == factor * weight.detach().abs().max().float()


def test_margin_leaves_room() -> None:
    narrow, x, _ = make("tensorwise")
    wide, _, _ = make("tensorwise", margin=3)
    outlier = x.detach()
    rows = [precision_of(w)._amax(outlier, recipe("tensorwise").x, 0, None) for w in (narrow, wide)]
    assert rows[1] == 8 * rows[0]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_scales_that_agree_make_parts_equal_the_whole(name: str) -> None:
    """Split by input features, as two ranks would: quantized values of the parts are parts of the quantized values."""
    _, x, _ = make(name)
    schemes = recipe(name)
    rows, _ = cast(x.detach(), schemes.x, None)
    assert rows is not None
    half = x.detach()[:, : IN // 2]
    amax = x.detach().abs().amax(1, keepdim=True).float() if name == "rowwise" else x.detach().abs().max().float()
    part, _ = cast(half, schemes.x, None, amax=amax)
    assert part is not None
    assert torch.equal(part.data.view(torch.uint8), rows.data[:, : IN // 2].view(torch.uint8))


def test_products_say_why_not() -> None:
    left = quantize(torch.ones(16, 16), Scheme("e4m3"))
    for name, why in (("torch_tensorwise", "cuda"), ("torch_rowwise", "tiles")):
        with pytest.raises(BackendError, match=why):
            scaled_mm(left, left, torch.bfloat16, backend=name)
    five = quantize(torch.ones(16, 16), Scheme("e5m2"))
    with pytest.raises(BackendError, match="e5m2 by e4m3"):
        scaled_mm(five, five, torch.bfloat16, backend="torch_tensorwise")
    assert error(scaled_mm(left, left, torch.float64), torch.full((16, 16), 16.0)) < 1e-6


@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (1, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_trial_of_a_product_fits_into_its_dtype(tile: tuple[int, int], dtype: torch.dtype) -> None:
    """A library that is right must pass, and one that forgets the bias must not."""
    spec = ScaledMatmulSpec("cpu", Scheme("e4m3", tile), Scheme("e4m3", tile), dtype, bias=True)
    left, right, bias = trial(spec, "cpu")
    product = choose(SCALED_MM, spec, "reference")
    expected = product(left, right, torch.float64, False, bias)
    found = product(left, right, dtype, False, bias)
    assert found.isfinite().all()
    assert error(found, expected) < 1e-2
    assert error(product(left, right, dtype, False, None), expected) > 0.1
