"""Grouped products in 8 and 4 bits, against one linear layer per expert."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from megalight.ops.autograd import RecomputeRecipe, attach_recipe
from megalight.ops.grouped_linear import grouped_linear, low_precision_stacks
from megalight.ops.grouped_linear.low_precision import OneByOne, StackPrecision, stack_precision_of
from megalight.ops.grouped_linear.low_precision_stacks import Apart, Together
from megalight.ops.linear import WeightGradients, deferring, linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import release, state_of
from megalight.ops.permute import permutation, permute, unpermute
from megalight.ops.quantize.amax_history import AmaxHistory
from megalight.ops.quantize.recipes import RECIPES, recipe
from tests.ops.test_linear import Parameter, with_main_grad

SIZES, IN, OUT = (37, 0, 5, 16), 96, 64
BEYOND = 3
"""Rows after the last group, which nothing may read."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TOGETHER = ("tensorwise", "delayed", "rowwise")
WAYS = [("one by one", name) for name in RECIPES] + [("together", name) for name in TOGETHER]


def experts(name: str, session: Session, history: AmaxHistory | None = None) -> list[LowPrecision]:
    parts = history.weights if history is not None else [AmaxHistory(16) for _ in SIZES]
    return [LowPrecision(recipe(name), session, emulate=True, history=part) for part in parts]


def precision(way: str, name: str, session: Session) -> StackPrecision:
    if way == "together":
        return Together(recipe(name), session, count=len(SIZES), emulate=True)
    history = AmaxHistory(16, len(SIZES))
    history.place(torch.device("cpu"))
    return OneByOne(experts(name, session, history), history)


def stack(way: str, name: str, session: Session) -> Parameter:
    weight = with_main_grad(draw(len(SIZES), OUT, IN))
    state_of(weight).stack_precision = precision(way, name, session)
    return weight


def rows(features: int, seed: int) -> Tensor:
    """Experts see values of very different magnitudes. Rows after the last group are NaN."""
    x = draw(sum(SIZES) + BEYOND, features, seed=seed) * torch.logspace(-2, 2, sum(SIZES) + BEYOND)[:, None]
    x[sum(SIZES) :] = torch.nan
    return x


def equal(found: Tensor, exact: Tensor) -> bool:
    """Whether all rows are equal but for the order of float64 sums, which some BLAS libraries choose by the shape."""
    return bool(((found - exact).norm(dim=-1) <= 1e-14 * exact.norm(dim=-1)).all())


def sequential(name: str, session: Session) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs and gradients of one linear layer per expert."""
    ends = list(accumulate(SIZES))
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
    layers = []
    for matrix, expert in zip(draw(len(SIZES), OUT, IN), experts(name, session), strict=True):
        layers.append(with_main_grad(matrix))
        state_of(layers[-1]).precision = expert
    for weight, end, size in zip(layers, ends, SIZES, strict=True):
        if size:
            x = rows(IN, 1)[end - size : end].requires_grad_()
            y = linear(x, weight)
            y.backward(rows(OUT, 2)[end - size : end])
            assert x.grad is not None
            found[0].append(y.detach())
            found[1].append(x.grad)
        found[2].append(weight.main_grad)
    return found


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("way", "name"), WAYS)
def test_products_equal_a_linear_layer_per_expert(way: str, name: str, known: bool) -> None:
    """Over two steps: past magnitudes of ``delayed`` are those of one expert."""
    ours, theirs = Session(seed=5), Session(seed=5)
    weight, offsets = stack(way, name, ours), torch.tensor(SIZES).cumsum(0).int()
    for number in range(2):
        weight.main_grad.fill_(torch.nan)
        state_of(weight).untouched = True
        with ours.step(number):
            x = rows(IN, 1).requires_grad_()
            y = grouped_linear(x, weight, offsets, SIZES if known else None)
            y.backward(rows(OUT, 2))
        with theirs.step(number):
            expected = sequential(name, theirs)
        assert x.grad is not None
        for found, exact in zip((y, x.grad), expected[:2], strict=True):
            assert equal(found[: sum(SIZES)], torch.cat(exact))
        assert equal(weight.main_grad, torch.stack(expected[2]))


@pytest.mark.parametrize("name", TOGETHER)
def test_large_experts_run_one_by_one_where_the_host_knows_their_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may change from one way to the other, also inside of a step: values and histories are the same."""
    mean = sum(SIZES) * IN * OUT / len(SIZES)
    limits = ("LARGE_ONE_SCALE", "LARGE") if name != "rowwise" else ("LARGE", "LARGE_ONE_SCALE")
    monkeypatch.setattr(low_precision_stacks, limits[0], mean)
    monkeypatch.setattr(low_precision_stacks, limits[1], torch.inf)
    ours, theirs = Session(seed=5), Session(seed=5)
    weight, plain = stack("together", name, ours), stack("one by one", name, theirs)
    both, alone = stack_precision_of(weight), stack_precision_of(plain)
    smaller = (*SIZES[:-1], SIZES[-1] - 1)
    assert both is not None
    assert alone is not None
    assert both.way(weight, None) is both.way(weight, smaller) is both
    assert isinstance(both.way(weight, SIZES), Apart)
    offsets = torch.tensor(SIZES).cumsum(0).int()
    for number, known in enumerate([(True, False), (False, True), (True, True)]):
        found = []
        for stacked, session in ((weight, ours), (plain, theirs)):
            stacked.main_grad.fill_(torch.nan)
            state_of(stacked).untouched = True
            with session.step(number):
                for sizes in known:
                    x = (2.0**number * rows(IN, 1)).requires_grad_()
                    y = grouped_linear(x, stacked, offsets, SIZES if sizes else None)
                    y.backward(rows(OUT, 2))
                    assert x.grad is not None
                    found.append((y[: sum(SIZES)], x.grad[: sum(SIZES)], stacked.main_grad.clone()))
        for one, other in zip(found[:2], found[2:], strict=True):
            assert all(map(equal, one, other))
    if both.history is not None:
        assert alone.history is not None
        assert both.history.past is not None
        assert alone.history.past is not None
        filled = torch.tensor(SIZES) > 0  # one by one, nothing of an expert without rows is cast
        assert torch.equal(both.history.past[filled], alone.history.past[filled])


def test_both_ways_multiply_by_one_cast_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_stacks, "LARGE_ONE_SCALE", 1.0)
    weight, offsets = stack("together", "tensorwise", Session()), torch.tensor(SIZES).cumsum(0).int()
    both, x = stack_precision_of(weight), rows(IN, 1)
    assert isinstance(both, low_precision_stacks.Together)
    both.refresh(weight)
    kept = both._kept
    expected = grouped_linear(x, weight, offsets, SIZES)
    with torch.no_grad():
        weight.mul_(2)
    both.refresh(weight)
    assert both._kept is kept  # cast into the same memory
    for sizes in (SIZES, None):
        assert equal(grouped_linear(x, weight, offsets, sizes)[: sum(SIZES)], 2 * expected[: sum(SIZES)])
    both.way(weight, SIZES).release()
    assert both._kept is None


@pytest.mark.parametrize("name", TOGETHER)
def test_a_trial_finds_devices_without_the_products_of_one_expert(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, weight = torch.device("cpu"), draw(len(SIZES), OUT, IN)
    monkeypatch.setattr(low_precision_stacks, "LARGE_ONE_SCALE", 1.0)
    monkeypatch.setattr(low_precision_stacks, "LARGE", 1.0)
    exact = low_precision_stacks.products(recipe(name), device, emulate=True)

    def refusing(*_: object, emulate: bool) -> list[Tensor]:
        if not emulate:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return exact

    for products, expected in (
        (low_precision_stacks.products, None),  # on a CPU, the reference serves
        (lambda *_, emulate: exact if emulate else [tensor + 1 for tensor in exact], "gives wrong products here"),
        (refusing, "refuses it here: CUBLAS_STATUS_NOT_SUPPORTED"),
    ):
        monkeypatch.setattr(low_precision_stacks, "products", products)
        low_precision_stacks.one_by_one_why_not.cache_clear()
        found = low_precision_stacks.one_by_one_why_not(recipe(name), device)
        assert found is None if expected is None else expected in str(found)
        stacked = Together(recipe(name), Session(), count=len(SIZES))
        assert stacked.wants_sizes(weight) == (expected is None)
        assert (stacked.way(weight, SIZES) is stacked) == (expected is not None)
    low_precision_stacks.one_by_one_why_not.cache_clear()


def once(way: str, name: str, x: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
    session = Session(seed=1)
    weight, leaf = stack(way, name, session), rows(IN, 1).requires_grad_()
    with session.step(0):
        grouped_linear(x(leaf), weight, torch.tensor(SIZES).cumsum(0).int()).backward(rows(OUT, 2))
    assert leaf.grad is not None
    return [leaf.grad[: sum(SIZES)], weight.main_grad]


@pytest.mark.parametrize(("way", "name"), [("together", "tensorwise"), ("one by one", "nvfp4")])
def test_deferred_weight_gradients_use_the_casts_of_the_input_gradient(way: str, name: str) -> None:
    expected, queue = once(way, name), WeightGradients()
    with deferring(queue):
        found = once(way, name)
    assert bool((found[1] == 0).all())
    queue.run()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("way", ["one by one", "together"])
def test_recomputed_inputs_and_gradients_of_autograd(way: str) -> None:
    expected = once(way, "rowwise", torch.Tensor.clone)
    read: list[int] = []
    found = once(
        way, "rowwise", lambda x: attach_recipe(x.clone(), RecomputeRecipe(torch.clone, (x,), lambda: read.append(1)))
    )
    assert read == [1]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    weight, x = stack(way, "rowwise", Session()), rows(IN, 1)
    release(weight)
    grouped_linear(x, weight, torch.tensor(SIZES).cumsum(0).int()).backward(rows(OUT, 2))
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected[1])
    with torch.no_grad():
        assert grouped_linear(x, weight, torch.tensor(SIZES).cumsum(0).int()).shape == (len(x), OUT)


@pytest.mark.parametrize(
    ("way", "shapes"),
    [
        ("one by one", [(IN, 48), (1, 1), (IN, 16), (1, 1), (IN, 16), (1, 1)]),  # tokens are padded to 16
        ("together", [(IN, 512), (4, IN)]),  # room for each to end at a multiple of 128
    ],
)
def test_saved_inputs_take_one_byte(way: str, shapes: list[tuple[int, int]]) -> None:
    """The input of the weight gradient is kept quantized, and each expert has scales of its own."""
    weight, kept = stack(way, "tensorwise", Session()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(rows(IN, 1).requires_grad_(), weight, torch.tensor(SIZES).cumsum(0).int())
    assert [tuple(t.shape) for t in kept] == shapes
    assert [t.element_size() for t in kept] == [1, 4] * (len(shapes) // 2)
    scales = torch.cat([t.flatten() for t in kept[1::2]])
    assert len(set(scales.tolist())) == 3 + (way == "together")  # an expert without tokens has one, too


@pytest.mark.parametrize("way", ["one by one", "together"])
def test_the_first_tokens_of_an_expert_are_scaled_by_their_own_values(way: str) -> None:
    """An expert that had no tokens in earlier steps has no magnitudes from which a scale could come."""
    session = Session()
    weight = stack(way, "delayed", session)
    history = stack_precision_of(weight).history
    for step, sizes in enumerate(((8, 0, 8, 8), (8, 8, 8, 0))):
        offsets = torch.tensor(sizes).cumsum(0).int()
        x, grad = (1e-3 * draw(24, size, seed=size) for size in (IN, OUT))
        x.requires_grad_()
        with session.step(step):
            y = grouped_linear(x, weight, offsets)
            y.backward(grad)
    exact = x[8:16] @ weight.detach()[1].T
    assert (y[8:16] - exact).norm() / exact.norm() < 0.05
    exact = grad[8:16] @ weight.detach()[1]
    assert (x.grad[8:16] - exact).norm() / exact.norm() < 0.1
    assert history.past.shape == (4, 16, 3)
    assert history.past[1, 0, 0] == x[8:16].detach().abs().max().float()
    assert history.past[1, 1, 0] == 0
    assert history.past[3, 0, 0] == history.past[3, 1, 0] > 0  # without tokens, the value of the step before


@pytest.mark.parametrize(("way", "name"), [way for way in WAYS if way[1] != "nvfp4"])
def test_padding_to_the_alignment_of_a_recipe_changes_no_value(way: str, name: str) -> None:
    """``nvfp4`` draws other random numbers for more rows; everything else does not see zeros."""
    tokens, chosen = draw(23, IN, seed=4), torch.randint(4, (23, 2), generator=torch.Generator().manual_seed(7))
    chosen[chosen == 1] = 2  # one expert has no tokens
    found = []
    for alignment in (1, recipe(name).alignment):
        session = Session()
        weight, x = stack(way, name, session), tokens.clone().requires_grad_()
        where = permutation(chosen, 4, alignment=alignment)
        assert not bool((where.offsets % alignment).any())
        with session.step(0):
            y = unpermute(grouped_linear(permute(x, where)[0], weight, where.offsets), where)
            y.backward(draw(23, OUT, seed=5))
        assert x.grad is not None
        found.append((y.detach(), x.grad, weight.main_grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(one.abs().max()))
    assert recipe(name).alignment == {"mxfp8": 32}.get(name, 16)
    assert recipe("nvfp4").alignment == 128
