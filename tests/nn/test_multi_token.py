"""Multi-token prediction: equal to its formula token by token, and without effect outside of training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError, DataError
from megalight.models.gpt import GPT, AttentionConfig, GPTConfig, MultiTokenConfig, PositionConfig
from megalight.models.gpt.flops import flops_per_token, num_parameters
from megalight.models.gpt.module import GPTModule
from megalight.nn.init import initialize
from megalight.types import TokenBatch
from tests.support.reference_gpt import (
    canonical_gradients,
    canonical_params,
    reference_depths,
    reference_losses,
    relative_error,
)

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=12,
    num_heads=3,
    num_kv_heads=1,
    head_dim=6,
    ffn_hidden_size=20,
    vocab_size=31,
    max_sequence_length=16,
    mtp=MultiTokenConfig(num_layers=2, loss_scale=0.3),
)
CONFIGS = {
    "rotary": CONFIG,
    "learned": replace(CONFIG, position=PositionConfig(kind="learned"), tie_embeddings=True),
    "one depth": replace(CONFIG, mtp=MultiTokenConfig()),
    # the first of three layers of a depth has a window, as the pattern goes on from the two layers of the model
    "pattern": replace(
        CONFIG,
        layer_pattern="*-",
        attention=AttentionConfig(window=2, window_pattern=(False, False, True)),
        mtp=MultiTokenConfig(num_layers=2, pattern="*-*"),
    ),
}
DOCUMENTS = ((7, 1, 4), (2, 10))


def batch_of(documents: tuple[tuple[int, ...], ...] | None = DOCUMENTS) -> TokenBatch:
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(31, (2, 12), generator=generator) for _ in range(2))
    return TokenBatch(tokens, labels, (torch.rand(2, 12, generator=generator) > 0.3).double(), documents)


def built(config: GPTConfig) -> tuple[GPTModule, GPT]:
    module = GPTModule(config)
    model: Any = module.build_model().double()
    initialize(model, 1)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module, model


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_equal_the_formula(name: str) -> None:
    config = CONFIGS[name]
    module, model = built(config)
    batch = batch_of()
    params = canonical_params(model)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    documents = [n for row in DOCUMENTS for n in row]
    rows = zip(*(x.reshape(-1).split(documents) for x in (batch.tokens, batch.labels, batch.loss_mask)), strict=True)
    wanted = torch.zeros(1 + config.num_depths, dtype=torch.float64)
    for tokens, labels, mask in rows:
        wanted[0] += (reference_losses(params, config, tokens[None], labels[None])[0] * mask).sum()
        # depth k at token i reads token i + k, and predicts its label
        for k, losses in enumerate(reference_depths(params, config, tokens, labels), 1):
            wanted[k] += (losses * mask[k:]).sum()

    loss = module.loss_step(module.forward_step(model, batch), batch)
    counts = module.aux_loss_counts(batch)
    share = config.mtp.loss_scale / config.num_depths if config.mtp else 0.0
    found = [loss.sum, *(value / share for value in loss.aux_losses.values())]
    assert relative_error(torch.stack(found), wanted) < 1e-12
    for k, (name, (total, count)) in enumerate(loss.metrics.items(), 1):
        assert name == f"mtp_{k}_loss"
        assert relative_error(total, wanted[k]) < 1e-12
        masks = batch.loss_mask.reshape(-1).split(documents)
        assert count == counts[f"mtp_{k}"] == sum(mask[k:].sum() for mask in masks)

    (loss.sum + sum(loss.aux_losses.values())).backward()
    (wanted[0] + share * wanted[1:].sum()).backward()
    gradients = canonical_gradients(model)
    assert gradients.keys() == params.keys()
    for key, gradient in gradients.items():
        assert relative_error(gradient, params[key].grad) < 1e-11, key


def test_evaluation_and_generation_leave_the_depths_out() -> None:
    module, model = built(CONFIG)
    plain = GPT(replace(CONFIG, mtp=None)).double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")})
    batch = batch_of()
    model.eval()
    carry = module.forward_step(model, batch)
    assert carry.keys() == {"losses"}
    loss = module.loss_step(carry, batch)
    assert (loss.aux_losses, loss.metrics) == ({}, {})
    wanted = plain(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1)).losses
    assert torch.equal(loss.sum, (wanted * batch.loss_mask.reshape(-1)).sum())


def test_later_tokens_stay_in_their_sequence() -> None:
    batch = TokenBatch(torch.arange(1, 13).view(2, 6), torch.arange(2, 14).view(2, 6), torch.ones(2, 6), ((4, 2), (6,)))
    later = batch.shifted(2)
    assert later.tokens.tolist() == [[3, 4, 0, 0, 0, 0], [9, 10, 11, 12, 0, 0]]
    assert later.labels.tolist() == [[4, 5, 0, 0, 0, 0], [10, 11, 12, 13, 0, 0]]
    assert later.loss_mask.tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]


def test_shares_of_a_context_hold_later_tokens_of_the_whole() -> None:
    batch, later = batch_of(), batch_of().shifted(1)
    for rank in range(2):
        share, index = batch.sequences.zigzag(rank, 2)
        real, places = index >= 0, index.clamp(min=0)
        cut = batch.context_share(rank, 2, ahead=1).shifted(1)
        assert torch.equal(cut.tokens.reshape(-1), later.tokens.reshape(-1)[places] * real)
        assert torch.equal(cut.loss_mask.reshape(-1), later.loss_mask.reshape(-1)[places] * real)
        assert cut.share is not None
        assert cut.share.lengths == share.lengths
    with pytest.raises(DataError, match="tokens up to 1 places later, not 2"):
        batch.context_share(0, 2, ahead=1).shifted(2)


def test_without_later_tokens_nothing_counts() -> None:
    """No loss, no gradient and no NaN where no token has one so much later."""
    module, model = built(CONFIG)
    batch = batch_of(((1,) * 12, (1,) * 12))
    loss = module.loss_step(module.forward_step(model, batch), batch)
    assert not any(loss.aux_losses.values())
    sum(loss.aux_losses.values()).backward()
    assert all(not p.grad.any() for p in model.mtp.parameters() if p.grad is not None)


def test_parameters_and_operations() -> None:
    plain = replace(CONFIG, mtp=None)
    h, layer = 12, 12 * 6 * (3 + 2) + 3 * 6 * 12 + 3 * 12 * 20 + 2 * 12
    assert num_parameters(CONFIG) - num_parameters(plain) == 2 * (layer + 2 * h * h + 3 * h)
    assert num_parameters(CONFIG) == sum(p.numel() for p in GPT(CONFIG).parameters())
    further = 6 * (layer - 2 * h + 2 * h * h + 31 * h) + 12 * 3 * 6 * 16 / 2
    assert flops_per_token(CONFIG, 16) - flops_per_token(plain, 16) == 2 * further


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "mtp.num_layers is 0; it must be at least 1"),
        ({"loss_scale": 0.0}, "mtp.loss_scale is 0.0; it must be above 0"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MultiTokenConfig(**values)
