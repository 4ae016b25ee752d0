"""BERT on one device: packing, parts of a model, what it refuses. `test_bert_hugging_face` holds its numbers."""

from dataclasses import replace

import pytest
import torch

from megalight.errors import ConfigurationError, DataError, MegalightError
from megalight.models.bert import Bert, BertConfig, DropoutConfig, InitConfig
from megalight.models.bert.config import flops_per_token, num_parameters
from megalight.models.bert.presets import preset
from megalight.nn.init import initialize
from megalight.types import PackedSequences
from tests.models.bert_samples import SIZES, build, packed
from tests.support.reference_gpt import canonical_params, relative_error

LENGTHS = [1, 7, 12, 2, 11]


def test_sequences_in_a_pack_equal_sequences_alone():
    model = build()
    tokens, types, labels = packed(LENGTHS)
    alone = [
        model(t, PackedSequences.of_lengths([len(t)]), y, z)
        for t, y, z in zip(*(x.split(LENGTHS) for x in (tokens, types, labels)), strict=True)
    ]
    together = model(tokens, PackedSequences.of_lengths(LENGTHS), types, labels)
    assert relative_error(together.losses, torch.cat([output.losses for output in alone])) < 1e-12
    assert relative_error(together.order, torch.cat([output.order for output in alone])) < 1e-12
    assert (together.losses[labels < 0] == 0).all()


def test_every_token_sees_the_whole_sequence():
    model = build()
    model.head = None
    tokens, types, _ = packed(LENGTHS)
    sequences = PackedSequences.of_lengths(LENGTHS)
    before = model(tokens, sequences, types).hidden
    tokens[19] = (tokens[19] + 1) % 61  # the last token of the third sequence
    changed = (model(tokens, sequences, types).hidden - before).abs().amax(-1) > 0
    assert changed.tolist() == [8 <= place < 20 for place in range(33)]


def test_padding_changes_no_real_token():
    model = build()
    tokens, types, labels = packed(LENGTHS)
    sequences = PackedSequences.of_lengths(LENGTHS)
    padded = sequences.pad_to(8)
    tokens_, types_, labels_ = (torch.cat([x, x[: padded.num_padding]]) for x in (tokens, types, labels))
    output, expected = model(tokens_, padded, types_, labels_), model(tokens, sequences, types, labels)
    assert relative_error(output.losses[:33], expected.losses) < 1e-12
    assert output.order.shape == (6, 2)
    assert relative_error(output.order[:5], expected.order) < 1e-12


def test_cut_in_two_is_the_whole():
    model, first, second = build(), build(), build()
    first.head, second.embed = None, None
    del first.layers["1"], second.layers["0"]
    tokens, types, labels = packed(LENGTHS)
    sequences = PackedSequences.of_lengths(LENGTHS)
    output = second(None, sequences, labels=labels, hidden=first(tokens, sequences, types).hidden)
    expected = model(tokens, sequences, types, labels)
    assert torch.equal(output.losses, expected.losses)
    assert torch.equal(output.order, expected.order)
    assert set(first.state_dict()) | set(second.state_dict()) == set(model.state_dict())
    with pytest.raises(DataError, match="token ids"):
        first(None, sequences)
    with pytest.raises(DataError, match="hidden states"):
        second(tokens, sequences)


def test_rows_choose_what_the_head_sees():
    model = build()
    tokens, types, labels = packed(LENGTHS)
    sequences = PackedSequences.of_lengths(LENGTHS)
    rows = (labels >= 0).nonzero().flatten()
    some, every = (model(tokens, sequences, types, labels, rows=chosen) for chosen in (rows, None))
    assert relative_error(some.losses, every.losses[rows]) < 1e-12
    assert relative_error(some.order, every.order) < 1e-12
    some = model(tokens, sequences, types, rows=rows).logits
    assert relative_error(some, model(tokens, sequences, types).logits[rows]) < 1e-12


def test_without_token_types_all_are_of_the_first():
    model = build()
    tokens, types, labels = packed(LENGTHS)
    sequences = PackedSequences.of_lengths(LENGTHS)
    found = model(tokens, sequences, None, labels).losses
    assert torch.equal(found, model(tokens, sequences, torch.zeros_like(types), labels).losses)
    assert not torch.equal(found, model(tokens, sequences, types, labels).losses)


def test_too_long_sequences_are_refused():
    with pytest.raises(DataError, match=r"21 tokens.*max_sequence_length = 20"):
        build()(torch.zeros(21, dtype=torch.long), PackedSequences.of_lengths([21]))


def test_dropout_acts_in_training_only():
    model = build(dropout=DropoutConfig(hidden=0.2, attention=0.2, embedding=0.2))
    tokens, types, labels = packed(LENGTHS)
    sequences = PackedSequences.of_lengths(LENGTHS)
    first, second = (model(tokens, sequences, types, labels).losses for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    expected = build()(tokens, sequences, types, labels).losses
    assert relative_error(model(tokens, sequences, types, labels).losses, expected) < 1e-12


def test_initial_weights():
    config = BertConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=64)
    for scale, std in ((False, 0.02), (True, 0.005)):
        model = Bert(replace(config, init=InitConfig(scale_residual=scale)))
        initialize(model, 0)
        assert model.layers["3"].mlp.down.weight.std().item() == pytest.approx(std, rel=0.05)
    assert model.head.masked.lm.output_layer.weight is model.embed.word.weight
    assert "head.masked.lm.output_layer.weight" not in canonical_params(model)
    assert torch.equal(model.embed.norm.weight, torch.ones(64))


@pytest.mark.parametrize("options", [{}, {"sentence_order": False}, {"tie_embeddings": False, "num_token_types": 3}])
def test_counts(options):
    config = BertConfig(**{**SIZES, **options})
    model = Bert(config)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    matrices = [p for name, p in model.named_parameters() if name.startswith("layers") and p.ndim == 2]
    head = 0.15 * (24 * 24 + 61 * 24)
    expected = 6 * (sum(p.numel() for p in matrices) + head) + 12 * 2 * 24 * 16
    assert flops_per_token(config, 16) == pytest.approx(expected)


def test_presets():
    assert num_parameters(preset("bert_base")) == 110_106_428  # transformers' BertForPreTraining
    with pytest.raises(MegalightError, match="bert_large"):
        preset("bert_larg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 25}, "25 is not a multiple of num_heads 4"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_token_types": 0}, "num_token_types is 0"),
        ({"norm_eps": 0.0}, r"norm_eps is 0\.0"),
        ({"activation": "swiglu"}, "which is gated"),
        ({"activation": "gelo"}, "did you mean"),
        ({"dropout": {"hiden": 0.1}}, "'dropout.hiden'"),
        ({"dropout": {"hidden": 1.0}}, r"dropout\.hidden is 1\.0"),
    ],
)
def test_bad_configurations_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=f"(?i){message}"):
        BertConfig.from_dict({**SIZES, **options})


def test_a_configuration_survives_plain_values():
    config = preset("bert_large")
    assert BertConfig.from_dict(config.to_dict()) == config


def test_the_lightning_module_comes_on_first_use():
    import megalight.models.bert as package
    from megalight.models.bert.module import BertModule

    assert package.BertModule is BertModule
    with pytest.raises(AttributeError, match="has no attribute 'BertModul'"):
        _ = package.BertModul
