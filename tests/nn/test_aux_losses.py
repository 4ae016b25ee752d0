"""Auxiliary losses: gradients begin where a loss arises, a second run and evaluation count nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalight.errors import ConfigurationError
from megalight.nn import LayerContext, run_layers
from megalight.nn.aux_losses import AttachedAuxLosses, KeptAuxLosses, ZeroAuxLosses, collecting
from megalight.parallel.recompute import RecomputeOptions, apply_recompute
from megalight.types import PackedSequences

SEQUENCES = PackedSequences.of_lengths([6])


class Penalized(nn.Module):
    """A layer whose activations should be small."""

    def __init__(self, again: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.again = again

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        return self.own(hidden, context) if self.again is None else self.again(self.own, hidden, context)

    def own(self, hidden: Tensor, context: LayerContext) -> Tensor:
        out = self.linear(hidden).tanh()
        return context.aux_losses.attach("penalty", out.square().mean(), hidden + out)


class Model(nn.Module):
    def __init__(self, again: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): Penalized(again) for i in range(3)}).double()

    def forward(self, hidden: Tensor) -> Tensor:
        return run_layers(self.layers, hidden, LayerContext(SEQUENCES))


def hidden() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(6, 4, dtype=torch.float64, requires_grad=True)


def kept() -> tuple[float, list[Tensor]]:
    """The losses added by hand, 0.25 times."""
    model, x = Model(), hidden()
    with collecting(KeptAuxLosses()) as losses:
        out = model(x)
    total = out.square().sum() + 0.25 * losses.values["penalty"]
    return float(losses.values["penalty"].detach()), list(torch.autograd.grad(total, [x, *model.parameters()]))


def again(function: Callable[..., Tensor], *args: Any) -> Tensor:
    out: Tensor = checkpoint(function, *args, use_reentrant=False)
    return out


FULL = {n: RecomputeOptions(granularity="full", num_layers=n) for n in (1, 2)}


@pytest.mark.parametrize(
    ("recompute", "own"),
    [(RecomputeOptions(), None), (FULL[1], None), (FULL[2], None), (RecomputeOptions(), again), (FULL[1], again)],
    ids=["none", "full", "full of 2", "torch's own", "both"],
)
@pytest.mark.parametrize("way", ["attached", "kept"])
def test_gradients_and_totals(way: str, recompute: RecomputeOptions, own: Callable[..., Any] | None) -> None:
    expected, gradients = kept()
    model, x = Model(own), hidden()
    apply_recompute(model, recompute)
    losses = AttachedAuxLosses("cpu") if way == "attached" else KeptAuxLosses()
    if isinstance(losses, AttachedAuxLosses):
        losses.begin(torch.tensor(0.25))
        with collecting(losses):
            model(x).square().sum().backward()
        assert float(losses.totals["penalty"]) == pytest.approx(expected, rel=1e-14)
        losses.begin(torch.tensor(1.0))
        assert float(losses.totals["penalty"]) == 0
    else:
        with collecting(losses):
            out = model(x)
        (out.square().sum() + 0.25 * losses.values["penalty"]).backward()
        assert float(losses.values["penalty"].detach()) == pytest.approx(expected, rel=1e-14)
    for found, gradient in zip([x.grad, *(p.grad for p in model.parameters())], gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


def test_the_first_stage_of_a_frozen_model_has_gradients_too() -> None:
    """Hidden states need no gradient, but the loss does."""
    losses = AttachedAuxLosses("cpu")
    losses.begin(torch.tensor(3.0))
    weight = torch.tensor(2.0, requires_grad=True)
    context = LayerContext(SEQUENCES, aux_losses=losses)
    context.aux_losses.attach("one", weight * 5, torch.ones(2)).sum().backward()
    assert weight.grad == 15


def test_losses_of_a_pass_that_counts_for_nothing_are_zero() -> None:
    losses = AttachedAuxLosses("cpu")
    losses.begin(torch.tensor(3.0))
    weight = torch.tensor(2.0, requires_grad=True)
    ZeroAuxLosses(losses).attach("one", weight * 5, torch.ones(2)).sum().backward()
    assert weight.grad == 0
    assert losses.totals == {"one": 0}


def test_losses_whose_things_are_counted_are_means_over_all_of_them() -> None:
    """Passes over 3 and 1 things, of 4 in the step; a loss that nobody counts stays a mean over the passes."""
    losses = AttachedAuxLosses("cpu")
    losses.begin(torch.tensor(1 / 2), {"counted": torch.tensor(1 / 4)})
    weights = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for weight, count in zip(weights, (3, 1), strict=True):
        for name in ("counted", "plain"):
            losses.attach(name, weight * 5, torch.ones(2), count).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [3 / 4 * 5 + 1 / 2 * 5, 1 / 4 * 5 + 1 / 2 * 5]
    assert losses.totals == {"counted": 20, "plain": 10}


def test_nothing_is_collected_without_gradients() -> None:
    model, losses = Model(), AttachedAuxLosses("cpu")
    with collecting(losses), torch.no_grad():
        out = model(hidden())
    assert not losses.totals
    assert not out.requires_grad


def test_a_lost_loss_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    context, weight = LayerContext(SEQUENCES), torch.ones((), requires_grad=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = context.aux_losses.attach("a lost one", weight, torch.ones(2))
    assert not out.requires_grad
    assert caplog.text.count("the auxiliary loss 'a lost one' has no effect") == 1


def test_a_loss_is_a_scalar() -> None:
    with pytest.raises(ConfigurationError, match=r"auxiliary loss 'rows' has the shape \[2\]"):
        LayerContext(SEQUENCES).aux_losses.attach("rows", torch.ones(2), torch.ones(2))
