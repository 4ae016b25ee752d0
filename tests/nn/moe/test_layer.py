"""A mixture of experts on one device against loops over tokens and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.nn import MLP
from megalight.nn.canonical import canonical_tensors
from megalight.nn.moe import RouterConfig
from megalight.nn.moe.dispatch import Grouped, LocalDispatcher
from megalight.ops.router import Routes
from tests.nn.moe.loops import WIDTH, context, layer, looped
from tests.support.canonical import load_canonical


def after(logits: Tensor, top_k: int) -> dict[int, Tensor]:
    """The softmax over the chosen experts."""
    chosen = sorted(range(len(logits)), key=lambda e: -float(logits[e].detach()))[:top_k]
    total = sum(logits[e].exp() for e in chosen)
    return {e: logits[e].exp() / total for e in chosen}


def before(logits: Tensor, top_k: int) -> dict[int, Tensor]:
    """The softmax over all experts, not normalized again."""
    chosen = sorted(range(len(logits)), key=lambda e: -float(logits[e].detach()))[:top_k]
    return {e: logits[e].exp() / logits.exp().sum() for e in chosen}


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(("top_k", "pre_softmax"), [(2, False), (3, True), (1, True)])
def test_equal_to_loops(activation: str, top_k: int, pre_softmax: bool) -> None:
    moe = layer(activation=activation, config=RouterConfig(top_k=top_k, pre_softmax=pre_softmax))
    hidden = torch.randn(23, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(23, WIDTH, dtype=torch.float64)
    rule = before if pre_softmax else after
    answers = []
    for out in (moe(hidden, context(23)), looped(moe, hidden, lambda logits: rule(logits, top_k))):
        answers.append([out, *torch.autograd.grad((out * weights).sum(), [hidden, *moe.parameters()])])
    for actual, expected in zip(*answers, strict=True):
        assert (actual - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_experts_without_tokens_get_zero_gradients(tokens: int) -> None:
    moe = layer()
    routes = Routes(torch.ones(tokens, 1, dtype=torch.float64), torch.full((tokens, 1), 2))
    moe.router.forward = lambda hidden, context: routes  # type: ignore[method-assign,assignment]
    moe(torch.randn(tokens, WIDTH, dtype=torch.float64), context()).square().sum().backward()
    for parameter in moe.experts.parameters():
        assert parameter.grad is not None
        assert [bool(part.any()) for part in parameter.grad] == [False, False, tokens > 0, False]


def test_each_expert_is_an_mlp_of_its_own_name() -> None:
    moe = layer()
    tensors = canonical_tensors(moe.experts)
    kinds = ("down", "gate", "up")
    assert sorted(tensors) == [f"{expert}.{kind}.weight" for expert in range(4) for kind in kinds]
    mlp = MLP(WIDTH, 6).double()
    load_canonical(mlp, {f"{kind}.weight": tensors[f"3.{kind}.weight"] for kind in kinds})
    hidden = torch.randn(5, WIDTH, dtype=torch.float64)
    ends = torch.tensor([0, 0, 0, 5], dtype=torch.int32)
    found = moe.experts(Grouped(hidden, torch.ones(5, dtype=torch.float64), ends))
    assert (found - mlp(hidden)).norm() <= 1e-12 * found.norm()


@pytest.mark.parametrize("dtype", ["float32", None])
def test_logits_are_computed_in_the_dtype_of_the_router(dtype: Any) -> None:
    moe = layer(config=RouterConfig(dtype=dtype)).to(torch.bfloat16)
    hidden = torch.randn(9, WIDTH).bfloat16().requires_grad_()
    logits = moe.router.logits(hidden)
    assert logits.dtype == (torch.float32 if dtype else torch.bfloat16)
    weights = torch.randn_like(logits)
    found = torch.autograd.grad((logits * weights).sum(), [hidden, moe.router.weight])
    assert [grad.dtype for grad in found] == [torch.bfloat16] * 2
    exact = (weights.double() @ moe.router.weight.double(), weights.double().T @ hidden.double())
    for actual, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2**-7 if dtype else 2**-4, atol=0.05)


@pytest.mark.parametrize("alignment", [1, 4])
def test_the_host_learns_the_rows_of_each_expert_if_asked(alignment: int) -> None:
    dispatcher, hidden = LocalDispatcher(), torch.randn(3, WIDTH)
    dispatcher.alignment = alignment
    routes = Routes(torch.rand(3, 2), torch.tensor([[3, 0], [3, -1], [0, 3]]))
    untold, _ = dispatcher.dispatch(hidden, routes, 4)
    assert untold.sizes is None
    dispatcher.tells_sizes = True
    told, _ = dispatcher.dispatch(hidden, routes, 4)
    assert told.sizes == ([2, 0, 0, 3] if alignment == 1 else [4, 0, 0, 4])
    assert torch.equal(torch.tensor(told.sizes).cumsum(0), untold.offsets)
    padded, _ = dispatcher.dispatch(hidden, routes, 4, capacity=4)
    assert padded.sizes == [4] * 4
