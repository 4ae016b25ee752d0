"""Choices of the router: noise, forced balance, Sinkhorn, capacity, and the bias that needs no loss."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.nn.aux_losses import AuxLosses, KeptAuxLosses, ZeroAuxLosses, end_step
from megalight.nn.init import initialize
from megalight.nn.moe import BalanceConfig, CapacityConfig, MoEConfig, Router, RouterConfig, SharedConfig
from megalight.nn.moe.router import sinkhorn
from tests.nn.moe.loops import WIDTH, context, layer


def router(capacity: CapacityConfig | None = None, balance: BalanceConfig | None = None, **options: Any) -> Router:
    made = Router(WIDTH, 6, RouterConfig(**options), balance, capacity, std=0.7).double()
    initialize(made, 5)
    return made


def tokens(count: int = 12) -> Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64)


def test_the_router_is_the_op_with_its_own_logits() -> None:
    made = router(score="sigmoid", top_k=4, num_groups=3, group_top_k=2, scale=2.5, bias=True, expert_bias=True)
    assert made.bias is not None
    assert made.expert_bias is not None
    torch.nn.init.normal_(made.bias)
    made.expert_bias.normal_()
    hidden = tokens()
    probs, experts = made(hidden, context(12))
    for row, token in enumerate(hidden):
        scores = (made.weight @ token + made.bias).sigmoid().detach()
        biased = scores + made.expert_bias
        best = sorted(range(3), key=lambda group: -float(biased[2 * group : 2 * group + 2].topk(2).values.sum()))[:2]
        chosen = sorted(e for group in best for e in (2 * group, 2 * group + 1))
        assert sorted(experts[row].tolist()) == chosen
        weights = {e: 2.5 * float(scores[e] / sum(scores[i] for i in chosen)) for e in chosen}
        assert dict(zip(experts[row].tolist(), probs[row].tolist(), strict=True)) == pytest.approx(weights)


def test_noise_in_training_alone() -> None:
    made = router(jitter=0.1)
    hidden = tokens().to(torch.bfloat16)
    found: list[Tensor] = []
    made.logits = lambda x: found.append(x) or torch.zeros(12, 6)  # type: ignore[method-assign,assignment,func-returns-value]
    made(hidden, context(12))
    made.eval()(hidden, context(12))
    assert found[0].dtype == torch.bfloat16
    assert not torch.equal(found[0], hidden)
    assert ((found[0].float() / hidden.float() - 1).abs() <= 0.11).all()
    assert found[1] is hidden


def test_forced_balance_is_the_same_in_every_pass_and_keeps_gradients() -> None:
    made = router(force_balance=True)
    hidden = tokens(600).requires_grad_()
    first, second = made(hidden, context(600)), made(tokens(600), context(600))
    assert torch.equal(first.experts, second.experts)
    loads = torch.bincount(first.experts.flatten(), minlength=6)
    assert (loads / 200 - 1).abs().max() < 0.25
    (gradient,) = torch.autograd.grad((first.probs * torch.rand(600, 2)).sum(), hidden)
    assert gradient.any()


def test_sinkhorn_balances_rows_and_columns() -> None:
    logits = 3 * torch.randn(40, 6, dtype=torch.float64) + torch.arange(6)
    scaled = sinkhorn(logits)
    torch.testing.assert_close(scaled.sum(1), torch.full((40,), 1 / 40, dtype=torch.float64), rtol=1e-2, atol=0)
    torch.testing.assert_close(scaled.sum(0), torch.full((6,), 1 / 6, dtype=torch.float64), rtol=1e-2, atol=0)
    ratio = scaled.log() - logits  # one factor per row and one per column
    torch.testing.assert_close(ratio - ratio[:1], (ratio - ratio[:1])[:, :1].expand(-1, 6))
    made = router(sinkhorn=True, pre_softmax=True)
    hidden = tokens()
    probs, experts = made(hidden, context(12))
    assert torch.equal(experts, sinkhorn(made.logits(hidden).detach()).topk(2).indices)
    torch.testing.assert_close(probs, made.logits(hidden).softmax(-1).gather(1, experts))
    assert torch.equal(made.eval()(hidden, context(12)).experts, made.logits(hidden).topk(2).indices)


@pytest.mark.parametrize("keep", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
def test_capacity_drops_tokens(keep: Any, pad: bool) -> None:
    moe = layer(num_experts=4)
    moe.router.capacity = CapacityConfig(factor=0.5, keep=keep, pad=pad)
    hidden = tokens(13)
    probs, experts = moe.router(hidden, context(13))
    whole = layer(num_experts=4).router(hidden, context(13))
    most = 4  # ceil(13 * 2 / 4 * 0.5)
    for expert in range(4):
        pairs = [(t, s) for t in range(13) for s in range(2) if whole.experts[t, s] == expert]
        if keep == "probs":
            pairs.sort(key=lambda pair: -float(whole.probs[pair].detach()))
        kept = {(t, s) for t in range(13) for s in range(2) if experts[t, s] == expert}
        assert kept == set(pairs[:most])
    assert (experts < 0).any()
    # the output is that of the kept experts alone
    out = moe(hidden, context(13))
    expected = torch.zeros_like(out)
    for place, token in enumerate(hidden):
        for slot, expert in enumerate(experts[place].tolist()):
            if expert >= 0:
                gate, up = (moe.experts.up[expert] @ token).chunk(2)
                inner = probs[place, slot] * torch.nn.functional.silu(gate) * up
                expected[place] = expected[place] + moe.experts.down[expert] @ inner
    torch.testing.assert_close(out, expected)
    assert moe.router.rows(13) == (most if pad else None)


def counted(made: Router, *collectors: AuxLosses, training: bool = True) -> Tensor | None:
    made.train(training)
    for collector in collectors:
        made(tokens(), context(12, losses=collector))
    return made.counts


def test_what_counts() -> None:
    made = router(score="sigmoid", expert_bias=True, balance=BalanceConfig(aux_loss=1.0))
    kept = KeptAuxLosses()
    assert counted(made, AuxLosses(), ZeroAuxLosses(kept)) is None
    assert counted(made, kept, training=False) is None
    with torch.no_grad():
        assert counted(made, kept) is None
    counts = counted(made, kept, kept)
    assert counts is not None
    assert float(counts[:6].sum()) == 2 * 12 * 2
    assert counts.tolist()[6:12] == [0] * 6
    assert float(counts[12]) == pytest.approx(float(kept.values["router_aux_loss"].detach()), rel=0.9)
    assert float(counts[13]) == 2
    made.count(torch.zeros_like(counts))
    sequences = context(9, losses=kept)
    padded = type(sequences)(sequences.sequences.pad_to(12), {}, kept)
    before = counts.clone()
    made.train()(tokens(), padded)
    assert float((counts - before)[:6].sum()) == 9 * 2


def test_the_bias_moves_against_the_loads() -> None:
    made = router(score="sigmoid", expert_bias=True, expert_bias_rate=0.25)
    (_, experts) = made(tokens(), context(12, losses=KeptAuxLosses()))
    loads = torch.bincount(experts.flatten(), minlength=6)
    end_step(made, lambda counts: counts + torch.tensor([0.0] * 5 + [100.0] + [0.0] * 7))
    assert made.loads is not None
    assert made.loads.tolist() == [*loads[:5].tolist(), loads[5] + 100]
    assert made.expert_bias is not None
    assert made.expert_bias.tolist() == [0.25] * 5 + [-0.25]
    assert made.counts is not None
    assert not made.counts.any()


def test_the_bias_of_a_frozen_router_stays() -> None:
    """As under adapters, whose checkpoints may leave out all that is frozen."""
    made = router(score="sigmoid", expert_bias=True).requires_grad_(False)
    made(tokens(), context(12, losses=KeptAuxLosses()))
    end_step(made, lambda counts: counts + torch.tensor([0.0] * 5 + [100.0] + [0.0] * 7))
    assert made.loads is not None
    assert made.expert_bias is not None
    assert not made.expert_bias.any()


def test_the_bias_stays_in_float32() -> None:
    made = router(score="sigmoid", expert_bias=True).bfloat16()
    assert made.weight.dtype == torch.bfloat16
    assert made.expert_bias is not None
    made.expert_bias.fill_(1e-3 + 1e-6)
    assert made.float().bfloat16().expert_bias.tolist() == torch.full((6,), 1e-3 + 1e-6).tolist()  # type: ignore[union-attr]
    assert "expert_bias" in made.state_dict()


@pytest.mark.parametrize(
    ("router_options", "options", "message"),
    [
        ({"top_k": 9}, {}, "moe.router.top_k=9 is above moe.num_experts=8"),
        ({"top_k": 0}, {}, "moe.router.top_k is 0; it must be a whole number, at least 1"),
        ({"top_k": 2.5}, {}, "moe.router.top_k is 2.5; it must be a whole number"),
        ({"scale": 0.0}, {}, "moe.router.scale is 0.0; it must be finite and above 0"),
        ({"scale": float("nan")}, {}, "moe.router.scale is nan"),
        ({"expert_bias_rate": 0.1}, {}, "moe.router.expert_bias_rate=0.1 without a bias does nothing"),
        ({"top_k": 1}, {}, "Set moe.router.pre_softmax=true"),
        ({"score": "tanh"}, {}, "moe.router.score is 'tanh'; it must be one of softmax, sigmoid"),
        ({"score": "sigmoid", "pre_softmax": True}, {}, "sigmoid scores have no softmax"),
        ({"dtype": "bfloat16"}, {}, "moe.router.dtype is 'bfloat16'"),
        ({"expert_bias": True}, {}, "moe.router.expert_bias=true with moe.router.score=softmax"),
        ({"expert_bias_rate": -1.0}, {}, "moe.router.expert_bias_rate is -1.0"),
        ({"jitter": 1.0}, {}, "moe.router.jitter is 1.0"),
        ({"num_groups": 3, "group_top_k": 1}, {}, "moe.router: 8 experts do not divide into num_groups=3"),
        ({"num_groups": 4}, {}, "moe.router: num_groups=4 and group_top_k=None; set both"),
        ({"sinkhorn": True}, {}, "Set moe.router.score=softmax and moe.router.pre_softmax=true"),
        (
            {"sinkhorn": True, "pre_softmax": True},
            {"balance": BalanceConfig(aux_loss=0.1)},
            "moe.router.sinkhorn=true balances the experts itself",
        ),
        (
            {"sinkhorn": True, "pre_softmax": True},
            {"capacity": CapacityConfig(factor=1.0)},
            "moe.router.sinkhorn=true with moe.capacity",
        ),
        ({}, {"weigh_input": True}, "moe.weigh_input=true with moe.router.top_k=2"),
        ({}, {"clamp": 0.0}, "moe.clamp is 0.0; it must be finite and above 0. null means no limit"),
        ({}, {"num_experts": 0}, "moe.num_experts is 0"),
        ({}, {"num_experts": 10**9}, "moe.num_experts is 1000000000; it must be at least 1, and at most 10000"),
        ({}, {"pattern": (False,)}, "at least one entry must be true"),
        ({}, {"ffn_hidden_size": -1}, "moe.ffn_hidden_size is -1"),
    ],
)
def test_configurations_that_cannot_work(router_options: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MoEConfig(**{"num_experts": 8, "router": RouterConfig(**router_options), **options})


# What an option needs beside it, so that the number alone is wrong.
NEEDED: dict[str, dict[str, Any]] = {"expert_bias_rate": {"score": "sigmoid", "expert_bias": True}}
NUMBERS = [
    (kind, field.name)
    for kind in (RouterConfig, BalanceConfig, CapacityConfig, MoEConfig)
    for field in fields(kind)
    if str(field.type).startswith("float")
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_every_number_must_be_finite(kind: type, name: str, value: float) -> None:
    """The message says the value, the rule, and what to do instead."""
    options = {"num_experts": 8} if kind is MoEConfig else {}
    with pytest.raises(ConfigurationError, match=rf"moe\.\S*{name} is {value}; it must be [^.]*\. ."):
        kind(**options, **NEEDED.get(name, {}), **{name: value})


def test_coefficients_and_capacities_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match=r"moe.balance.seq_aux_loss is -1; it must be finite and at least 0"):
        BalanceConfig(seq_aux_loss=-1)
    for factor in (0, float("inf")):
        with pytest.raises(ConfigurationError, match=rf"capacity.factor is {factor}; it must be finite and above 0"):
            CapacityConfig(factor=factor)
    with pytest.raises(ConfigurationError, match=r"moe.shared.ffn_hidden_size is 0; it must be at least 1"):
        SharedConfig(ffn_hidden_size=0)
    with pytest.raises(ConfigurationError, match=r"moe.capacity.keep is 'last'"):
        CapacityConfig(factor=1, keep="last")  # type: ignore[arg-type]
