"""Fine-tuning of a GPT: tokens without a loss skip the rest of the last layer and the head, and all stays the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalight.models.gpt import AttentionConfig, GPTConfig, MultiTokenConfig, NormConfig
from megalight.models.gpt.flops import flops_per_token, weights_of_losses
from megalight.models.gpt.model import GPT
from megalight.models.gpt.module import GPTModule
from megalight.nn.init import initialize
from megalight.nn.moe import MoEConfig
from megalight.types import TokenBatch
from tests.strategies.training import BASE, SEED, global_batch
from tests.strategies.training import CONFIGS as DENSE
from tests.support.reference_gpt import relative_error

MTP = replace(BASE, mtp=MultiTokenConfig())
CONFIGS = DENSE | {
    "gate": replace(BASE, attention=AttentionConfig(output_gate=True)),
    "norms after": replace(BASE, norm=NormConfig(after=True)),
    "convolution": replace(BASE, mixer_pattern=("attention", "conv")),
    "experts": replace(BASE, moe=MoEConfig(num_experts=4, ffn_hidden_size=12)),
    "pattern": replace(BASE, layer_pattern="*-"),
}
WHOLE = {"experts", "pattern"}
"""Models whose last layer computes all tokens."""


def of(config: GPTConfig) -> GPTModule:
    made = GPTModule(config)
    made.model = GPT(config).double()
    initialize(made.model, SEED)
    return made.train()


def trained(made: GPTModule, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of each token, and the gradients."""
    made.model.zero_grad()
    carry = made.forward_step(made.model, batch)
    made.loss_step(carry, batch).sum.backward()
    return made.output_step(carry, batch).detach(), {
        name: parameter.grad.clone() for name, parameter in made.model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_all_tokens(name: str, packed: bool) -> None:
    made, batch, seen = of(CONFIGS[name]), global_batch(1, packed=packed), list[int]()
    last = made.model.layers[made.model.last_layer]
    for part in (getattr(last, "mlp", last), made.model.head):
        part.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    expected, gradients = trained(made, batch)
    found, others = trained(made, batch.with_rows())
    every, some = batch.tokens.numel(), int(batch.loss_mask.sum())
    assert some < every
    assert seen == [every, every, every if name in WHOLE else some, some]
    # Where nothing counts, a loss of all tokens is 0, too.
    assert relative_error(found, expected) < 1e-12
    assert others.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert relative_error(others[key], gradient) < 1e-12, key


@pytest.mark.parametrize("name", ["gqa", "gate", "convolution", "experts", "pattern"])
def test_flops_leave_out_what_is_skipped(name: str) -> None:
    config, batch = CONFIGS[name], global_batch(1)
    made = of(config)
    trained(made, batch)
    assert made.flops_per_token(12) == flops_per_token(config, 12)
    again = of(config)
    trained(again, batch.with_rows())
    assert weights_of_losses(config) == 101 * 32 + (
        0 if name in WHOLE else 3 * 32 * 48 + (0 if name == "convolution" else 32 * 32)
    )
    spared = 1 - float(batch.loss_mask.mean())
    assert made.flops_per_token(12) - again.flops_per_token(12) == pytest.approx(spared * 6 * weights_of_losses(config))


def test_multi_token_prediction_and_shares_of_tokens_read_all() -> None:
    batch = global_batch(1)
    for config, multiple in ((MTP, 1), (BASE, 4)):
        made = of(config)
        made.token_multiple = multiple
        expected, gradients = trained(made, batch)
        found, others = trained(made, batch.with_rows())
        assert torch.equal(found, expected)
        assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())
        assert made.flops_per_token(12) == flops_per_token(config, 12)


def test_rows_follow_a_batch() -> None:
    whole = global_batch(1)
    mask = whole.loss_mask.clone()
    mask[1], mask[2], mask[3, 5] = 0, 1, 0
    batch = replace(whole, loss_mask=mask).with_rows()
    assert batch.rows is not None
    assert batch.rows.tolist() == [place for place, weight in enumerate(mask.flatten().tolist()) if weight]
    parts = batch.split(1)
    assert [part.rows is None for part in parts] == [False, True, True, False]  # none counts, and all
    for part in (parts[0], parts[3]):
        assert part.rows.tolist() == part.loss_mask.flatten().nonzero().flatten().tolist()
        assert part.row_counts == (int(part.loss_mask.sum()),)
    assert batch.context_share(0, 2).rows is None
    assert batch.shifted(1).rows is None
    assert batch.to("cpu").rows is not None
    for alike in (torch.zeros_like(mask), torch.ones_like(mask)):
        every = replace(batch, loss_mask=alike).with_rows()
        assert (every.rows, every.row_counts) == (None, ())
