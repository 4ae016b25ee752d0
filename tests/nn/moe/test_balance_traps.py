"""Balance losses where other implementations have gone wrong: each test states the error that it would find."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalight.nn.aux_losses import KeptAuxLosses
from megalight.nn.moe import BalanceConfig, CapacityConfig, RouterConfig
from tests.nn.moe.loops import WIDTH, context, layer
from tests.nn.moe.test_balance import router, term

NAMES = ["aux_loss", "seq_aux_loss", "global_aux_loss"]


def test_packed_sequences_are_pools_of_their_own() -> None:
    """The error: sequences that are packed into one row share one pool, and their opposite choices cancel."""
    logits = torch.zeros(8, 5, dtype=torch.float64)
    logits[:4, 0] = logits[4:, 1] = 9
    apart, together = (float(term("seq_aux_loss", logits, lengths, top_k=1)) for lengths in ([4, 4], [8]))
    assert apart == pytest.approx(5, rel=0.01), "one expert has all tokens of each sequence"
    assert together == pytest.approx(2.5, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [[4, 4], [8]])
def test_the_number_of_tokens_is_no_factor(name: str, lengths: list[int]) -> None:
    """The error: a factor of the tokens of one sequence, or of a rank, where those of the whole pool belong."""
    logits = torch.randn(8, 5, dtype=torch.float64)
    halves = [logits[:4], logits[4:]] if len(lengths) == 2 else [logits]
    twice = torch.cat([part for half in halves for part in (half, half)])
    longer = [2 * length for length in lengths]
    assert float(term(name, twice, longer)) == pytest.approx(float(term(name, logits, lengths)), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_of_experts_that_are_not_chosen_have_gradients(name: str, score: str) -> None:
    """The error: scores are divided by the sum of the chosen ones alone, and others never learn."""
    logits = torch.randn(9, 5, dtype=torch.float64).mul_(2).requires_grad_()
    (found,) = torch.autograd.grad(term(name, logits, [5, 4], score), logits)
    others = torch.ones(9, 5, dtype=torch.bool).scatter_(1, logits.detach().topk(2).indices, False)
    assert found[others].abs().min() > 1e-9


def attached(hidden: Tensor, config: RouterConfig, capacity: float | None, bias: float = 0.0) -> dict[str, Tensor]:
    """All losses of a layer of experts."""
    moe = layer(config=config, balance=BalanceConfig(aux_loss=1.0, seq_aux_loss=1.0, global_aux_loss=1.0))
    moe.router.capacity = None if capacity is None else CapacityConfig(factor=capacity)
    if moe.router.expert_bias is not None:
        moe.router.expert_bias[0] = bias
    kept = KeptAuxLosses()
    moe(hidden, context(6, 6, losses=kept))
    return {name: value.detach() for name, value in kept.values.items()}


def test_dropped_tokens_count() -> None:
    """The error: choices are counted after the capacity has cut them off, and the fullest expert looks balanced."""
    hidden, config = torch.randn(12, WIDTH, dtype=torch.float64), RouterConfig(top_k=2)
    all_of_them = attached(hidden, config, None)
    assert len(all_of_them) == 3
    assert attached(hidden, config, 0.25) == all_of_them


def test_neither_bias_nor_groups_enter_the_losses() -> None:
    """The error: losses count what the biased or limited choice took, and no longer what the scores say."""
    hidden, config = torch.randn(12, WIDTH, dtype=torch.float64), RouterConfig(top_k=2, score="sigmoid")
    plain = attached(hidden, config, None)
    assert attached(hidden, replace(config, expert_bias=True), None, bias=100.0) == plain
    assert attached(hidden, replace(config, num_groups=2, group_top_k=1), None) == plain


@pytest.mark.parametrize("name", [*NAMES, "z_loss"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_half_precision_logits_have_wide_scores(name: str, score: str) -> None:
    """The error: scores and their sums are computed in the dtype of the logits, and lose all but three digits."""
    logits = torch.randn(4096, 5).bfloat16()
    found, expected = term(name, logits, [4096], score), term(name, logits.double(), [4096], score)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert router(name).config.dtype == "float32"
