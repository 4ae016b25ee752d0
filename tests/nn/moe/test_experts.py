"""Experts on one device against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.nn import MLP
from megalight.nn.canonical import canonical_tensors, load_canonical
from megalight.nn.init import initialise
from megalight.nn.moe import Experts, FixedRouter, MoE


def layer(num_experts: int = 4, activation: str = "swiglu") -> MoE:
    moe = MoE(FixedRouter(num_experts), Experts(num_experts, 8, 6, activation, std=0.5, down_std=0.5)).double()
    initialise(moe, 3)
    return moe


def looped(moe: MoE, hidden: Tensor) -> Tensor:
    """Each token through an MLP with its expert's canonical tensors."""
    tensors = dict(moe.experts.named_parameters())
    kind = "swiglu" if moe.experts.act.gated else "gelu"
    out = []
    for token in hidden:
        expert = int(token[: len(tensors["up"])].argmax())
        up, down = tensors["up"][expert], tensors["down"][expert]
        gate, wide = F.linear(token, up).chunk(2) if kind == "swiglu" else (None, F.linear(token, up))
        out.append(F.linear(F.silu(gate) * wide if gate is not None else F.gelu(wide), down))
    return torch.stack(out)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_equal_to_a_loop_over_tokens(activation: str) -> None:
    moe = layer(activation=activation)
    hidden = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(23, 8, dtype=torch.float64)
    answers = []
    for run in (moe, lambda x: looped(moe, x)):
        moe.zero_grad()
        out = run(hidden)
        found = torch.autograd.grad((out * weights).sum(), [hidden, *moe.parameters()])
        answers.append([out, *found])
    for actual, expected in zip(*answers, strict=True):
        assert (actual - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_experts_without_tokens_get_zero_gradients(tokens: int) -> None:
    moe = layer()
    hidden = torch.zeros(tokens, 8, dtype=torch.float64)
    hidden[:, 2] = torch.arange(1.0, tokens + 1)  # all to expert 2
    moe(hidden).square().sum().backward()
    for parameter in moe.experts.parameters():
        assert parameter.grad is not None
        assert [bool(part.any()) for part in parameter.grad] == [False, False, tokens > 0, False]


def test_each_expert_is_an_mlp_of_its_own_name() -> None:
    moe = layer()
    tensors = canonical_tensors(moe)
    kinds = ("down", "gate", "up")
    assert sorted(tensors) == [f"experts.{expert}.{kind}.weight" for expert in range(4) for kind in kinds]
    mlp = MLP(8, 6).double()
    load_canonical(mlp, {f"{kind}.weight": tensors[f"experts.3.{kind}.weight"] for kind in kinds})
    hidden = torch.randn(5, 8, dtype=torch.float64)
    found = moe.experts(hidden, torch.full((5,), 3))
    assert (found - mlp(hidden)).norm() <= 1e-12 * found.norm()
