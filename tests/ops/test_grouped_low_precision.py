"""Grouped products in 8 and 4 bits, against one linear layer per expert."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from megalight.ops.grouped_linear import grouped_linear
from megalight.ops.linear import linear
from megalight.ops.linear.deferred import WeightGradients, deferring
from megalight.ops.linear.inputs import Recipe, attach_recipe
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import casts_of, release, state_of
from megalight.ops.permute import permutation, permute, unpermute
from megalight.ops.quantize.recipes import RECIPES, recipe
from tests.ops.test_linear import Parameter, with_main_grad

SIZES, IN, OUT = (37, 0, 5, 16), 96, 64
BEYOND = 3
"""Rows after the last group, which nothing may read."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def experts(name: str, session: Session) -> list[LowPrecision]:
    return [LowPrecision(recipe(name), session, emulate=True) for _ in SIZES]


def stack(name: str, session: Session) -> Parameter:
    weight = with_main_grad(draw(len(SIZES), OUT, IN))
    state_of(weight).precisions = tuple(experts(name, session))
    return weight


def rows(features: int, seed: int) -> Tensor:
    """Experts see values of very different magnitudes. Rows after the last group are NaN."""
    x = draw(sum(SIZES) + BEYOND, features, seed=seed) * torch.logspace(-2, 2, sum(SIZES) + BEYOND)[:, None]
    x[sum(SIZES) :] = torch.nan
    return x


def sequential(name: str, session: Session) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs and gradients of one linear layer per expert."""
    ends = list(accumulate(SIZES))
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
    layers = []
    for matrix, precision in zip(draw(len(SIZES), OUT, IN), experts(name, session), strict=True):
        layers.append(with_main_grad(matrix))
        state_of(layers[-1]).precision = precision
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
@pytest.mark.parametrize("name", RECIPES)
def test_products_equal_a_linear_layer_per_expert(name: str, known: bool) -> None:
    """Bit for bit, over two steps: past magnitudes of ``delayed`` are those of one expert."""
    ours, theirs = Session(seed=5), Session(seed=5)
    weight, offsets = stack(name, ours), torch.tensor(SIZES).cumsum(0).int()
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
            assert torch.equal(found[: sum(SIZES)], torch.cat(exact))
        assert torch.equal(weight.main_grad, torch.stack(expected[2]))


def once(name: str, x: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
    session = Session(seed=1)
    weight, leaf = stack(name, session), rows(IN, 1).requires_grad_()
    with session.step(0):
        grouped_linear(x(leaf), weight, torch.tensor(SIZES).cumsum(0).int()).backward(rows(OUT, 2))
    assert leaf.grad is not None
    return [leaf.grad[: sum(SIZES)], weight.main_grad]


@pytest.mark.parametrize("name", ["tensorwise", "nvfp4"])
def test_deferred_weight_gradients_use_the_casts_of_the_input_gradient(name: str) -> None:
    expected, queue = once(name), WeightGradients()
    with deferring(queue):
        found = once(name)
    assert bool((found[1] == 0).all())
    queue.run()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_recomputed_inputs_and_gradients_of_autograd() -> None:
    expected = once("rowwise", torch.Tensor.clone)
    read: list[int] = []
    found = once("rowwise", lambda x: attach_recipe(x.clone(), Recipe(torch.clone, (x,), lambda: read.append(1))))
    assert read == [1]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    weight, x = stack("rowwise", Session()), rows(IN, 1)
    release(weight)
    grouped_linear(x, weight, torch.tensor(SIZES).cumsum(0).int()).backward(rows(OUT, 2))
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected[1])
    with torch.no_grad():
        assert grouped_linear(x, weight, torch.tensor(SIZES).cumsum(0).int()).shape == (len(x), OUT)


def test_saved_inputs_take_one_byte() -> None:
    """The input of the weight gradient is kept as codes, and each expert has scales of its own."""
    weight, kept = stack("tensorwise", Session()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(rows(IN, 1).requires_grad_(), weight, torch.tensor(SIZES).cumsum(0).int())
    codes = [t for t in kept if t.element_size() == 1]
    assert [tuple(t.shape) for t in codes] == [(IN, 48), (IN, 16), (IN, 16)]  # tokens are padded to 16
    scales = [float(t) for t in kept if t.element_size() == 4]
    assert len(set(scales)) == 3
    assert len(codes) + len(scales) == len(kept)
    assert [matrix.shape for _, matrix in casts_of(weight)] == [(OUT, IN)] * len(SIZES)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4"])
def test_padding_to_the_alignment_of_a_recipe_changes_no_value(name: str) -> None:
    """``nvfp4`` draws other random numbers for more rows; everything else does not see zeros."""
    tokens, chosen = draw(23, IN, seed=4), torch.randint(4, (23, 2), generator=torch.Generator().manual_seed(7))
    chosen[chosen == 1] = 2  # one expert has no tokens
    found = []
    for alignment in (1, recipe(name).alignment):
        session = Session()
        weight, x = stack(name, session), tokens.clone().requires_grad_()
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
