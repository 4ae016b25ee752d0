"""Losses of routers against loops over tokens, on one device and divided over several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalight.nn.moe import BalanceConfig, Pool, RouterConfig
from megalight.nn.moe.balance import losses
from megalight.nn.side_losses import KeptSideLosses
from megalight.types import PackedSequences
from tests.nn.moe.loops import WIDTH, context, layer


def scores_of(token: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return token.exp() / token.exp().sum()
    single = 1 / (1 + (-token).exp())
    return single / single.sum()


def pool_loss(logits: Tensor, top_k: int, score: str) -> Tensor:
    """The balance loss of one pool, term by term."""
    num_experts, number = logits.shape[1], len(logits)
    total = torch.zeros((), dtype=logits.dtype)
    rows = [scores_of(token, score) for token in logits]
    for expert in range(num_experts):
        chosen = sum(expert in row.detach().argsort(descending=True)[:top_k].tolist() for row in rows)
        total = total + num_experts / (top_k * number**2) * chosen * sum(row[expert] for row in rows)
    return total


def z(logits: Tensor) -> Tensor:
    return torch.stack([token.exp().sum().log() ** 2 for token in logits]).mean()


EXPECTED: dict[str, Callable[[Tensor, int, str], Tensor]] = {
    "aux_loss": pool_loss,
    "z_loss": lambda logits, top_k, score: z(logits),
}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", EXPECTED)
def test_losses_equal_loops(name: str, padding: int, score: str) -> None:
    logits = torch.randn(14, 5, dtype=torch.float64, requires_grad=True)
    sequences = PackedSequences.of_lengths([9, 5 - padding]).pad_to(14)
    assert sequences.num_padding == padding
    (found,) = losses(logits, 2, score, BalanceConfig(**{name: 1.0}), Pool(), sequences).values()
    expected = EXPECTED[name](logits[: 14 - padding], 2, score)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    actual, wanted = (torch.autograd.grad(value, logits)[0] for value in (found, expected))
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-15)
    assert not actual[14 - padding :].any()


def test_balanced_experts_cost_the_coefficient() -> None:
    # each expert is chosen equally often, and has the same mean score
    logits = torch.eye(6, dtype=torch.float64).repeat(2, 1) * 3
    sequences = PackedSequences.of_lengths([12])
    found = losses(logits, 1, "softmax", BalanceConfig(aux_loss=0.01), Pool(), sequences)
    assert float(found["aux_loss"]) == pytest.approx(1)


class Divided(Pool):
    """The second or first half of the tokens; ``values``: what the other device contributed to each mean."""

    def __init__(self, others: list[Tensor]) -> None:
        self.others = others
        self.asked: list[Tensor] = []

    def mean(self, value: Tensor) -> Tensor:
        self.asked.append(value.detach())
        return (value.detach() + self.others[len(self.asked) - 1]) / 2


@pytest.mark.parametrize("name", EXPECTED)
def test_the_mean_of_the_terms_of_devices_is_the_loss(name: str) -> None:
    """Devices have different numbers of tokens that count."""
    logits = torch.randn(12, 5, dtype=torch.float64)
    config = BalanceConfig(**{name: 1.0})
    whole = losses(logits[:10], 2, "softmax", config, Pool(), PackedSequences.of_lengths([10]))[name]
    shares = [(logits[:6], PackedSequences.of_lengths([6])), (logits[6:], PackedSequences.of_lengths([4]).pad_to(6))]
    asked = []
    for share, sequences in shares:
        pool = Divided([torch.zeros(1, dtype=torch.float64)] * 2)
        losses(share, 2, "softmax", config, pool, sequences)
        asked.append(pool.asked)
    terms = [
        losses(share, 2, "softmax", config, Divided(asked[1 - place]), sequences)[name]
        for place, (share, sequences) in enumerate(shares)
    ]
    torch.testing.assert_close(sum(terms) / 2, whole, rtol=1e-12, atol=0)


def test_the_router_attaches_its_losses_in_training_alone() -> None:
    moe = layer(config=RouterConfig(), balance=BalanceConfig(aux_loss=0.5, z_loss=0.25))
    hidden = torch.randn(7, WIDTH, dtype=torch.float64)
    kept = KeptSideLosses()
    out = moe(hidden, context(7, losses=kept))
    logits = moe.router.logits(hidden)
    torch.testing.assert_close(kept.values["router_aux_loss"], 0.5 * pool_loss(logits, 2, "softmax"))
    torch.testing.assert_close(kept.values["router_z_loss"], 0.25 * z(logits))
    kept = KeptSideLosses()
    assert torch.equal(moe.eval()(hidden, context(7, losses=kept)), out)
    assert not kept.values
