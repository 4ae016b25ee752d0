"""Tokens without a loss: the rest of the last layer and the head skip them, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.models.batches import skips
from megalight.models.gpt import AttentionConfig
from megalight.models.vlm import VLMConfig
from megalight.models.vlm.module import VLMModule, flops_of_losses
from megalight.nn.moe import MoEConfig
from megalight.ops.row_indexing import put_rows, take_rows
from tests.models.test_vlm import losses, module
from tests.models.vlm_samples import CONFIG, GEMMA, INTERN, LANGUAGE, QWEN, QWEN3, TILES, batch
from tests.support.reference_gpt import relative_error

EXPERTS = replace(CONFIG, language=replace(LANGUAGE, moe=MoEConfig(num_experts=4, ffn_hidden_size=12)))
CONFIGS = {
    "llava": CONFIG,
    "qwen": QWEN,
    "deepstack": QWEN3,
    "deepstack before the last": replace(QWEN3, language=replace(QWEN3.language, num_layers=3)),
    "mutual": GEMMA,
    "tiles": TILES,
    "intern": INTERN,
    "experts": EXPERTS,
    "gate": replace(CONFIG, language=replace(LANGUAGE, attention=AttentionConfig(output_gate=True))),
    "convolution": replace(CONFIG, language=replace(LANGUAGE, mixer_pattern=("attention", "conv"))),
    "pattern": replace(CONFIG, language=replace(LANGUAGE, layer_pattern="*-")),
}
WHOLE_MLP = {"deepstack", "experts", "pattern"}
"""Models whose last layer computes all tokens as a whole."""


def of(name: str) -> tuple[VLMModule, ImageTextBatch]:
    config = CONFIGS[name]
    return module(config), batch(config=config)


def test_rows_are_taken_and_put_back() -> None:
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([5, 0, 6])
    assert torch.equal(take_rows(x, rows), x[rows])
    torch.autograd.gradcheck(take_rows, (x, rows))
    values = torch.randn(3, dtype=torch.float64, requires_grad=True)
    a, b, c = values.tolist()
    assert put_rows(values, rows, 7).tolist() == [b, 0, 0, 0, 0, a, c]
    torch.autograd.gradcheck(put_rows, (values, rows, 7))


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_all_tokens(name: str) -> None:
    made, found = of(name)
    seen = list[int]()
    parts = dict(made.model.layers[made.model.last_layer].named_modules()) | {"head": made.model.head}
    for part in (part for part in ("attention.proj", "mlp", "head") if part in parts):
        parts[part].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    gradients = list[dict[str, torch.Tensor]]()
    for each in (found, found.with_rows()):
        carry = made.forward_step(made.model, each)
        made.model.zero_grad()
        made.loss_step(carry, each).sum.backward()
        gradients.append({key: p.grad.clone() for key, p in made.model.named_parameters() if p.grad is not None})
    every, some = found.tokens.numel(), int((found.loss_mask != 0).sum())
    assert some < every
    layer = len(seen) // 2 - 1  # modules of it that are looked at
    assert seen == [every] * (layer + 1) + [every if name in WHOLE_MLP else some] * layer + [some]
    assert layer == {"pattern": 1, "convolution": 1}.get(name, 2)
    whole = losses(made, found)
    assert relative_error(losses(made, found.with_rows()), whole) < 1e-12
    assert whole.shape == found.labels.shape
    assert gradients[0].keys() == gradients[1].keys()
    for key, expected in gradients[0].items():
        assert relative_error(gradients[1][key], expected) < 1e-12, key


def test_rows_are_those_with_a_loss() -> None:
    found = batch()
    mask = found.loss_mask.clone()
    mask[1] = 0
    found = replace(found, loss_mask=mask).with_rows()
    assert found.rows.tolist() == [place for place, weight in enumerate(mask.flatten().tolist()) if weight]
    assert found.row_counts == tuple(int(row.sum()) for row in mask)
    for part in found.split(1):
        assert isinstance(part, ImageTextBatch)
        own = part.loss_mask.flatten().nonzero().flatten().tolist()
        assert (None if part.rows is None else part.rows.tolist()) == (own or None)
        assert part.row_counts == ((len(own),) if own else ())
    pairs = [part.with_rows() for part in replace(found, rows=None, row_counts=()).split(2)]
    assert [part.rows.tolist() for part in found.split(2)] == [pair.rows.tolist() for pair in pairs]
    assert found.context_share(0, 2).rows is None
    assert found.to("cpu").rows is not None
    assert found.to("cpu").row_counts == found.row_counts
    none = replace(found, loss_mask=torch.zeros_like(mask), rows=None, row_counts=()).with_rows()
    assert none.rows is None


def test_shares_of_sequence_parallelism_are_whole() -> None:
    made, found = of("llava")
    expected = losses(made, found)
    made.token_multiple = 7
    assert not skips(found.with_rows(), 7)
    assert relative_error(losses(made, found.with_rows()), expected) < 1e-12


@pytest.mark.parametrize("name", ["llava", "qwen", "deepstack", "experts"])
def test_flops_leave_out_what_is_skipped(name: str) -> None:
    made, found = of(name)
    losses(made, found)
    alone = made.flops_per_token(24)
    again, _ = of(name)
    losses(again, found.with_rows())
    config: VLMConfig = CONFIGS[name]
    weights: Any = 101 * 32 + (0 if name in WHOLE_MLP else 32 * 32 + 3 * 32 * 48)
    spared = 1 - found.loss_mask.ne(0).double().mean().item()
    assert flops_of_losses(config) == 6 * weights
    assert alone - again.flops_per_token(24) == pytest.approx(spared * 6 * weights)


def test_image_tokens_have_no_share_in_the_gradient_of_the_table() -> None:
    made, found = of("llava")
    looked_up = list[torch.Tensor]()
    made.model.embed.word.register_forward_pre_hook(lambda _, args: looked_up.append(args[0]))
    made.loss_step(made.forward_step(made.model, found), found).sum.backward()
    (ids,), image = looked_up, found.tokens.flatten() == 100
    assert torch.equal(ids[~image], found.tokens.flatten()[~image])
    # Equal ids are summed one after the other: no more of them than there must be.
    assert ids[image].bincount().max() == 1
    gradient = made.model.embed.word.weight.grad
    named = torch.zeros(len(gradient), dtype=torch.bool).index_fill(0, found.tokens.flatten()[~image], True)
    assert gradient[named].any()
    assert not gradient[~named].any()
