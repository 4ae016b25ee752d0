"""Losses of routers against loops over tokens, on one device and divided over several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalight.nn import LayerContext
from megalight.nn.aux_losses import AuxLosses, KeptAuxLosses
from megalight.nn.moe import BalanceConfig, Pool, Router, RouterConfig
from megalight.nn.moe.router import balance_loss, losses, whole_balance_loss
from megalight.ops.router import Statistics
from megalight.types import PackedSequences
from tests.nn.moe.loops import WIDTH, context, layer


def router(name: str, top_k: int = 2, score: str = "softmax", pool: Pool | None = None) -> Router:
    """A router with one loss."""
    config = RouterConfig(top_k=top_k, score=score, pre_softmax=score == "softmax")  # type: ignore[arg-type]
    made = Router(WIDTH, 5, config, BalanceConfig(**{name: 1.0}))
    made.pool = pool or Pool()
    return made


def term(
    name: str, logits: Tensor, lengths: list[int], score: str = "softmax", pool: Pool | None = None, **options: int
) -> Tensor:
    """The loss of a router, with padding after the sequences."""
    sequences = PackedSequences.of_lengths(lengths).pad_to(len(logits))
    context = LayerContext(sequences, {}, KeptAuxLosses())
    (value,) = losses(router(name, score=score, pool=pool, **options), logits, context).values()
    return value


def scores_of(token: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return token.exp() / token.exp().sum()
    single = 1 / (1 + (-token).exp())
    return single / single.sum()


def pool_loss(logits: Tensor, top_k: int, score: str, counted: Tensor | None = None) -> Tensor:
    """The balance loss of one pool, term by term; ``counted``: the logits whose choices count, if others."""
    total = torch.zeros((), dtype=logits.dtype)
    rows = [scores_of(token, score) for token in logits]
    others = rows if counted is None else [scores_of(token, score) for token in counted]
    for expert in range(logits.shape[1]):
        chosen = sum(expert in row.detach().argsort(descending=True)[:top_k].tolist() for row in others)
        share = chosen / (top_k * len(others))
        total = total + logits.shape[1] * share * sum(row[expert] for row in rows) / len(rows)
    return total


def z(logits: Tensor) -> Tensor:
    return torch.stack([token.exp().sum().log() ** 2 for token in logits]).mean()


def by_sequence(logits: Tensor, lengths: list[int], score: str) -> Tensor:
    return torch.stack([pool_loss(part, 2, score) for part in logits.split(lengths)]).mean()


EXPECTED: dict[str, Callable[[Tensor, list[int], str], Tensor]] = {
    "aux_loss": lambda logits, lengths, score: pool_loss(logits, 2, score),
    "seq_aux_loss": by_sequence,
    "global_aux_loss": lambda logits, lengths, score: pool_loss(logits, 2, score),
    "z_loss": lambda logits, lengths, score: z(logits),
}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", EXPECTED)
def test_losses_equal_loops(name: str, padding: int, score: str) -> None:
    logits = torch.randn(14, 5, dtype=torch.float64, requires_grad=True)
    lengths = [9, 5 - padding]
    found = term(name, logits, lengths, score)
    expected = EXPECTED[name](logits[: 14 - padding], lengths, score)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    actual, wanted = (torch.autograd.grad(value, logits)[0] for value in (found, expected))
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-15)
    assert not actual[14 - padding :].any()


@pytest.mark.parametrize("name", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_balanced_experts_cost_the_coefficient(name: str) -> None:
    # each expert is chosen equally often, and has the same mean score
    logits = torch.eye(5, dtype=torch.float64).repeat(2, 1) * 3
    assert float(term(name, logits, [5, 5], top_k=1)) == pytest.approx(1)


def test_the_loss_of_a_whole_pool_is_the_general_one() -> None:
    sums = Statistics(*(torch.rand(shape, dtype=torch.float64) for shape in ((1, 6), (1, 6), (1,))))
    means = torch.cat([sums.counts, torch.full((1, 1), 11.0, dtype=torch.float64)], 1)
    torch.testing.assert_close(whole_balance_loss(sums, 11, 2), balance_loss(sums, means, means, 2), rtol=1e-12, atol=0)


class Divided(Pool):
    """Half of the tokens; ``others``: what the other device contributed to each mean."""

    whole = False

    def __init__(self, others: list[Tensor] | None = None) -> None:
        self.others = others
        self.asked: list[Tensor] = []

    def mean(self, value: Tensor) -> Tensor:
        self.asked.append(value.detach())
        return value.detach() if self.others is None else (value.detach() + self.others[len(self.asked) - 1]) / 2

    mean_of_replicas = mean


@pytest.mark.parametrize("name", EXPECTED)
def test_the_mean_of_the_terms_of_devices_is_the_loss(name: str) -> None:
    """Devices have different numbers of tokens that count, and one has none of the first sequence."""
    logits = torch.randn(12, 5, dtype=torch.float64)
    whole = term(name, logits[:10], [6, 4])

    class Second(Divided):
        def bounds(self, sequences: PackedSequences) -> Tensor:
            return torch.tensor([0, 0, 4, 6])

    class First(Divided):
        def bounds(self, sequences: PackedSequences) -> Tensor:
            return torch.tensor([0, 6, 6, 6])

    shares = [(logits[:6], [6], First), (logits[6:], [4], Second)]
    asked = []
    for share, lengths, kind in shares:
        pool = kind()
        term(name, share, lengths, pool=pool)
        asked.append(pool.asked)
    terms = [
        term(name, share, lengths, pool=kind(asked[1 - place])) for place, (share, lengths, kind) in enumerate(shares)
    ]
    torch.testing.assert_close(torch.stack(terms).mean(), whole, rtol=1e-12, atol=0)


def test_the_global_loss_counts_the_micro_batches_of_the_step() -> None:
    made = router("global_aux_loss")
    first, second, third = torch.randn(3, 8, 5, dtype=torch.float64)

    def loss(logits: Tensor, collector: AuxLosses) -> Tensor:
        return losses(made, logits, context(8, losses=collector))["global_aux_loss"]

    kept = KeptAuxLosses()
    torch.testing.assert_close(loss(first, kept), pool_loss(first, 2, "softmax"))
    again = context(8, losses=kept)
    both = pool_loss(second, 2, "softmax", torch.cat([first, second]))
    torch.testing.assert_close(losses(made, second, again)["global_aux_loss"], both)
    # a micro-batch that does not count sees the counts of the others
    torch.testing.assert_close(loss(third, AuxLosses()), pool_loss(third, 2, "softmax", torch.cat([first, second])))
    loss(third, kept)
    # recompute asks with the same context, and gets the counts of the first pass
    torch.testing.assert_close(losses(made, second, again)["global_aux_loss"], both)
    made.running.reset()
    torch.testing.assert_close(loss(third, kept), pool_loss(third, 2, "softmax"))


def test_the_router_attaches_its_losses_in_training_alone() -> None:
    moe = layer(config=RouterConfig(), balance=BalanceConfig(aux_loss=0.5, z_loss=0.25))
    hidden = torch.randn(7, WIDTH, dtype=torch.float64)
    kept = KeptAuxLosses()
    out = moe(hidden, context(7, losses=kept))
    logits = moe.router.logits(hidden)
    torch.testing.assert_close(kept.values["router_aux_loss"], 0.5 * pool_loss(logits, 2, "softmax"))
    torch.testing.assert_close(kept.values["router_z_loss"], 0.25 * z(logits))
    kept = KeptAuxLosses()
    assert torch.equal(moe.eval()(hidden, context(7, losses=kept)), out)
    assert not kept.values
