"""BertModule and its batch on one device: what does not depend on micro-batches, stages or shares."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megalight.data.bert.batch import BertBatch
from megalight.errors import CheckpointError, DataError
from megalight.models.bert import BertConfig
from megalight.models.bert.module import BertModule
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.types import Loss
from tests.models.bert_samples import SIZES, build, packed
from tests.support.reference_gpt import relative_error

LENGTHS = (9, 5, 12, 16, 11)


def batch() -> BertBatch:
    tokens, types, labels = packed(list(LENGTHS))
    return BertBatch(tokens, types, labels, torch.tensor([0, 1, 1, 0, 1]), LENGTHS)


def module(**options: Any) -> BertModule:
    made = BertModule(BertConfig(**{**SIZES, **options}))
    made.model = build(**options)
    return made


def objective(made: BertModule, batches: list[BertBatch], tokens: torch.Tensor) -> torch.Tensor:
    """As the strategy makes it of micro-batches: sums over the counts of the whole batch."""
    samples = sum(made.aux_loss_counts(micro_batch)["order_loss"] for micro_batch in batches)
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in batches:
        loss = made.loss_step(made.forward_step(made.model, micro_batch), micro_batch)
        total = total + loss.sum / tokens + sum(loss.aux_losses.values()) / samples
    return total


def direct(made: BertModule, whole: BertBatch) -> torch.Tensor:
    output = made.model(whole.tokens, whole.sequences, whole.token_types)
    return F.cross_entropy(output.logits, whole.labels) + F.cross_entropy(output.order, whole.order)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
def test_the_objective_does_not_depend_on_micro_batches(size: int, rows: bool) -> None:
    made, whole = module(), batch()
    whole = whole.with_rows() if rows else whole
    micro_batches = whole.split(size)
    assert [len(m) for m in micro_batches] == [len(LENGTHS[k : k + size]) for k in range(0, 5, size)]
    found = objective(made, micro_batches, made.loss_tokens(whole))
    assert relative_error(found, direct(made, whole)) < 1e-12


def test_rows_are_the_masked_tokens() -> None:
    whole = batch()
    labels = whole.labels.clone()
    labels[9:14] = -100  # of the second sample, none is masked
    whole = replace(whole, labels=labels).with_rows()
    assert whole.rows.tolist() == [k for k, label in enumerate(labels.tolist()) if label >= 0]
    for part in whole.split(1):
        masked = (part.labels >= 0).nonzero().flatten().tolist()
        assert (part.rows.tolist() if masked else part.rows) == (masked or None)
        assert part.row_counts == ((len(masked),) if masked else ())
    assert whole.context_share(0, 2).rows is None
    none = replace(whole, labels=torch.full_like(labels, -100), rows=None, row_counts=()).with_rows()
    assert none.rows is None


def test_outputs_are_those_of_masked_tokens() -> None:
    made, whole = module(), batch()
    carry = made.forward_step(made.model, whole)
    expected = carry["losses"][whole.labels >= 0]
    assert torch.equal(made.output_step(carry, whole), expected)
    carry = made.forward_step(made.model, whole.with_rows())
    assert relative_error(made.output_step(carry, whole.with_rows()), expected) < 1e-12


def test_metrics_count_samples() -> None:
    made, whole = module(), batch()
    whole = replace(whole, order=torch.tensor([0, 1, -100, 0, 1]))
    carry = made.forward_step(made.model, whole)
    loss = made.loss_step(carry, whole)
    total, asked = loss.metrics["order_loss"]
    assert asked == 4
    assert relative_error(total, F.cross_entropy(carry["order"], whole.order, reduction="sum")) < 1e-12
    right, asked = loss.metrics["order_accuracy"]
    assert (right, asked) == ((carry["order"].argmax(-1) == whole.order).sum(), 4)
    assert made.loss_tokens(whole) == (whole.labels >= 0).sum()


def test_padding_to_a_multiple_changes_nothing() -> None:
    made, whole = module(), batch()
    expected = made.loss_step(made.forward_step(made.model, whole), whole)
    made.token_multiple = 8
    carry = made.forward_step(made.model, whole)
    assert len(carry["losses"]) == 56
    found = made.loss_step(carry, whole)
    assert relative_error(found.sum, expected.sum) < 1e-12
    assert relative_error(found.aux_losses["order_loss"], expected.aux_losses["order_loss"]) < 1e-12
    assert len(made.output_step(carry, whole)) == (whole.labels >= 0).sum()


def test_a_model_cut_by_hand_gives_the_same_loss_and_gradients() -> None:
    made, whole = module(num_layers=3), batch()
    expected = made.loss_step(made.forward_step(made.model, whole), whole)
    (expected.sum + expected.aux_losses["order_loss"]).backward()
    stages = [build(num_layers=3) for _ in range(3)]
    for index, stage in enumerate(stages):
        stage.layers = torch.nn.ModuleDict({str(index): stage.layers[str(index)]})
        if index > 0:
            stage.embed = None
        if index < 2:
            stage.head = None
    carry, edges = None, []
    for stage in stages:
        if carry is not None:  # as if it had come from elsewhere
            edges.append((carry["hidden"], carry["hidden"].detach().requires_grad_()))
            carry = {"hidden": edges[-1][1]}
        carry = made.forward_step(stage, whole, carry)
    found = made.loss_step(carry, whole)
    assert relative_error(found.sum, expected.sum) < 1e-12
    assert torch.equal(found.metrics["order_accuracy"][0], expected.metrics["order_accuracy"][0])
    (found.sum + found.aux_losses["order_loss"]).backward()
    for output, received in reversed(edges):
        output.backward(received.grad)
    word = "embed.word.weight"
    tied = stages[0].embed.word.weight.grad + stages[2].head.masked.lm.output_layer.weight.grad
    assert relative_error(tied, made.model.get_parameter(word).grad) < 1e-12
    parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
    for name, parameter in made.model.named_parameters():
        if name != word and parameter.grad.norm() > 1e-12:
            assert relative_error(parameters[name].grad, parameter.grad) < 1e-12, name


def test_shares_of_the_context_hold_everything_once() -> None:
    whole = batch()
    shares = [whole.context_share(rank, 2, multiple=4) for rank in range(2)]
    assert whole.context_share(0, 1) is whole
    weights = torch.arange(61)  # a sum over the labels that tells them apart
    counted = sum(weights[share.labels[share.labels >= 0]].sum() for share in shares)
    assert counted == weights[whole.labels[whole.labels >= 0]].sum()
    assert [(share.order >= 0).sum().item() for share in shares] == [5, 0]
    first = shares[0].sequences.cu_seqlens[:5].long()
    starts = whole.sequences.cu_seqlens[:-1].long()
    assert torch.equal(shares[0].tokens[first], whole.tokens[starts])
    for share in shares:
        assert len(share) == 5
        assert len(share.tokens) % 4 == 0
        assert share.sequences.num_tokens == len(share.tokens) == len(share.labels) == len(share.token_types)
        assert share.to("cpu").sequences.context is not None
    with pytest.raises(DataError, match="split the whole batch first"):
        shares[0].split(2)


def test_samples_shorter_than_the_chunks_are_padded() -> None:
    tokens = torch.arange(1, 6)
    whole = BertBatch(tokens, torch.zeros_like(tokens), tokens, torch.zeros(2, dtype=torch.long), (3, 2))
    shares = [whole.context_share(rank, 4) for rank in range(4)]
    assert [share.sequences.lengths for share in shares] == [(2, 2)] * 4
    assert sorted(int(token) for share in shares for token in share.tokens if token) == [1, 2, 3, 4, 5]
    with pytest.raises(DataError, match=r"a share, .* cannot be cut"):
        shares[0].context_share(0, 2)


def test_a_model_without_order_has_no_such_loss() -> None:
    made, whole = module(sentence_order=False), batch()
    loss = made.loss_step(made.forward_step(made.model, whole), whole)
    assert isinstance(loss, Loss)
    assert not loss.aux_losses
    assert not loss.metrics


def test_checkpoints_say_what_they_hold() -> None:
    made = BertModule("bert_base")
    checkpoint: dict[str, Any] = {}
    made.on_save_checkpoint(checkpoint)
    made.on_load_checkpoint(checkpoint)
    assert BertConfig.from_dict(checkpoint["model"]["config"]) == made.config
    with pytest.raises(CheckpointError, match=r"num_layers is 24 here and 12 in the checkpoint"):
        BertModule("bert_large").check_checkpoint(checkpoint)
    gpt = GPTModule(GPTConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, max_sequence_length=8))
    with pytest.raises(CheckpointError, match=r"family bert, but this model is of gpt"):
        gpt.check_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match="not written by BertModule"):
        made.check_checkpoint({})


def test_data_that_does_not_fit_is_refused() -> None:
    made = BertModule("bert_base")
    with pytest.raises(DataError, match=r"sequence_length=513.*max_sequence_length=512"):
        made.check_data(SimpleNamespace(sequence_length=513))
    with pytest.raises(DataError, match="tokenizer has 31000 tokens"):
        made.check_data(SimpleNamespace(sequence_length=512, vocab_size=31000))
    made.check_data(None)
    assert made.flops_per_token(512) > 6 * 85e6
