"""A folder of ``transformers`` as a source: right values, no byte too many, and clear words when it is wrong."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalight.checkpoint import boxes
from megalight.checkpoint.foreign.transformers_folder import read_config
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.bert import BertModule
from megalight.models.gpt import GPTConfig, GPTModule
from megalight.models.gpt.hugging_face import config_from_transformers, from_transformers, weight_map
from megalight.models.hugging_face.export import export
from megalight.models.hugging_face.folder import Folder
from megalight.models.loading import transformers_model
from megalight.models.stored import open_model, save_model
from megalight.nn.canonical import canonical_tensors
from megalight.parallel.apply import parallelize
from megalight.parallel.initial_values import materialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model_plans import plan_for
from megalight.parallel.source import Target, parameter_targets
from megalight.types import PackedSequences
from tests.models.test_gpt_hugging_face import MODELS, theirs

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("folders")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            theirs(name).float().save_pretrained(root / name)
        return root / name

    return folder


def opened(folder: Path) -> tuple[GPTConfig, Folder]:
    config = config_from_transformers(read_config(folder))
    return config, Folder(folder, weight_map(config), "model.")


def whole(folder: Path) -> dict[str, Tensor]:
    module = GPTModule(weights=folder)
    module.configure_model()
    assert module.model is not None
    return canonical_tensors(module.model)


@pytest.mark.parametrize("name", MODELS)
def test_a_module_starts_from_a_folder(name: str, folders: Callable[[str], Path]) -> None:
    model = theirs(name).float()
    module = GPTModule(weights=folders(name))
    module.configure_model()
    assert module.config == config_from_transformers(model.config.to_dict())
    tokens = torch.randint(0, 53, (2, 17))
    assert module.model is not None
    logits = module.model(tokens.flatten(), PackedSequences.of_uniform(2, 17)).logits
    torch.testing.assert_close(logits.view(2, 17, 53), model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("gpt2", 3)])
def test_a_split_model_reads_its_own_bytes(
    name: str, tp: int, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "GAP", 1)
    config, source = opened(folders(name))
    expected = from_transformers(load_file(folders(name) / "model.safetensors"), config)
    total = sum(tensor.nbytes for tensor in expected.values())
    for rank in range(tp):
        with torch.device("meta"):
            model = GPTModule(config).build_model()
        mesh = ParallelMesh(tp, rank, tp=tp)
        specs = parallelize(model, plan_for(model), mesh, prefix="model.")
        materialize(model, "cpu")
        targets = list(parameter_targets(model.named_parameters(), specs))
        before = source.bytes_read
        source.fill(targets, prefix="model.")
        for target in targets:
            box = tuple(slice(o, o + n) for o, n in zip(target.offset, target.data.shape, strict=True))
            assert torch.equal(target.data, expected[target.name.removeprefix("model.")][box]), target.name
        held = sum(target.data.nbytes for target in targets)
        assert source.bytes_read - before == held
        assert held < (1 / tp + 0.1) * total


def test_any_box_is_filled_in_any_type(folders: Callable[[str], Path]) -> None:
    config, source = opened(folders("gpt2"))
    expected = from_transformers(load_file(folders("gpt2") / "model.safetensors"), config)
    for name in ("layers.1.attention.k.weight", "layers.0.mlp.up.weight", "layers.0.attention.v.bias"):
        tensor = expected[name]
        rows = torch.zeros((3, *tensor.shape[1:]), dtype=torch.float64)
        source.fill([Target(f"model.{name}", tuple(tensor.shape), (5,) + (0,) * (tensor.ndim - 1), rows)], strict=False)
        assert torch.equal(rows, tensor[5:8].double())


def rewritten(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """A copy of a folder with other tensors."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(change(load_file(folder / "model.safetensors")), target / "model.safetensors")
    return target


def test_names_as_files_of_base_models_have_them(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As the published GPT-2 has them: without the root, with masks as buffers, and a tied head of its own."""

    def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        found["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        return {**found, "lm_head.weight": tensors["transformer.wte.weight"].clone()}

    expected = whole(folders("gpt2"))
    found = whole(rewritten(folders("gpt2"), tmp_path / "published", published))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("row", [1, -1])
def test_a_head_that_is_tied_only_in_the_configuration_is_refused(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """transformers uses both weights then, and warns; what the message says does the same here."""

    def two(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        head[row] += 1  # one row alone, as where a token was added
        return {**tensors, "lm_head.weight": head}

    monkeypatch.setattr("megalight.models.hugging_face.folder.ROWS", 5)
    folder = rewritten(folders("llama_tied_scaled"), tmp_path / "two", two)
    message = r"lm_head\.weight differs from model\.embed_tokens\.weight.*set tie_word_embeddings to false in config"
    with pytest.raises(CheckpointError, match=message):
        GPTModule(weights=folder).configure_model()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": False}))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = whole(folder)
    assert torch.equal(found["head.output_layer.weight"], expected.lm_head.weight)
    assert not torch.equal(expected.lm_head.weight, expected.model.embed_tokens.weight)


def test_a_tied_head_may_be_there_in_a_narrower_type(folders: Callable[[str], Path], tmp_path: Path) -> None:
    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].bfloat16()}

    expected = whole(folders("llama_tied_scaled"))
    found = whole(rewritten(folders("llama_tied_scaled"), tmp_path / "rounded", rounded))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_several_files_that_are_links(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As the cache of the Hub has them."""
    theirs("llama").float().save_pretrained(tmp_path / "blobs", max_shard_size="10KB")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert len(list((tmp_path / "snapshot").glob("*.safetensors"))) > 3
    expected, found = whole(folders("llama")), whole(tmp_path / "snapshot")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_index_beside_a_single_file_is_passed_over(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As ``transformers`` does: a model that was saved in several files, and again in one, has both."""
    theirs("llama").float().save_pretrained(tmp_path, max_shard_size="10KB")
    new = {name: tensor + 1 for name, tensor in load_file(folders("llama") / "model.safetensors").items()}
    save_file(new, tmp_path / "model.safetensors", {"format": "pt"})
    found = canonical_tensors(transformers_model(tmp_path).root)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(found["head.norm.weight"], expected.model.norm.weight)
    assert torch.equal(found["head.norm.weight"], new["model.norm.weight"])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(
    value: float, folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoilt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        return tensors

    with caplog.at_level(logging.WARNING, "megalight"):
        save_model(open_model(folders("llama")), tmp_path / "good.ckpt")
        assert "NaN" not in caplog.text
        folder = rewritten(folders("llama"), tmp_path / "bad", spoilt)
        save_model(open_model(folder), tmp_path / "bad.ckpt")
        name = r"'model\.layers\.1\.mlp\.up\.weight' \(model\.layers\.1\.mlp\.up_proj\.weight\)"
        assert re.search(rf"bad holds NaN or infinity in {name}: the model computes NaN", caplog.text)
        caplog.clear()
        export(open_model(tmp_path / "bad.ckpt"), tmp_path / "exported")
        assert "exported holds NaN or infinity in model.layers.1.mlp.up_proj.weight: the model" in caplog.text


def changed(name: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        others = {key: tensor for key, tensor in tensors.items() if key != name}
        return others if value is None else {**others, name: value}

    return change


BAD = [
    (changed("model.norm.weight", None), r"'model\.head\.norm\.weight' \(model\.norm\.weight\) not in"),
    (
        changed("model.norm.weight", torch.zeros(25)),
        r"'model\.head\.norm\.weight' \(model\.norm\.weight\): \[25\] and \[24\]",
    ),
    (
        changed("model.layers.2.mlp.up_proj.weight", torch.zeros(40, 24)),
        r"holds 'model\.layers\.2\.mlp\.up\.weight' \(model\.layers\.2\.mlp\.up_proj\.weight\) that this model",
    ),
    (changed("model.vision.weight", torch.zeros(1)), r"model\.vision\.weight has no counterpart"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_folders_of_other_models_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    module = GPTModule(weights=rewritten(folders("llama"), tmp_path / "bad", change))
    with pytest.raises(CheckpointError, match=message):
        module.configure_model()


def test_all_shapes_that_differ_are_listed(folders: Callable[[str], Path]) -> None:
    config = GPTConfig.from_dict({**opened(folders("llama"))[0].to_dict(), "ffn_hidden_size": 48})
    message = r"layers\.0\.mlp\.down.*\[24, 40\] and \[24, 48\]; .*layers\.0\.mlp\.gate.*and 1 more"
    with pytest.raises(CheckpointError, match=message):
        GPTModule(config, weights=folders("llama")).configure_model()


def test_a_fused_tensor_of_another_size_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    change = changed("transformer.h.1.attn.c_attn.weight", torch.zeros(24, 96))
    with pytest.raises(CheckpointError, match=r"h\.1\.attn\.c_attn\.weight in .* has 96 output features.*asks for 72"):
        GPTModule(weights=rewritten(folders("gpt2"), tmp_path / "bad", change)).configure_model()


def test_a_configuration_of_ones_own(folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    """It counts, and the log says where it differs in what the weights were made for."""
    config = opened(folders("llama"))[0]
    module = GPTModule(GPTConfig.from_dict({**config.to_dict(), "max_sequence_length": 32}), weights=folders("llama"))
    with caplog.at_level(logging.WARNING, "megalight"):
        module.configure_model()
    assert module.config.max_sequence_length == 32
    assert "max_sequence_length is 32 here and 64 in the folder" in caplog.text


def test_what_cannot_be_started_from_is_said(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"GPTModule needs a configuration: .*llama3_8b.*or weights"):
        GPTModule()
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        GPTModule(weights=tmp_path)
    with pytest.raises(ConfigurationError, match="holds a model of type 'llama'; this family reads bert"):
        BertModule(weights=folders("llama"))
    (tmp_path / "config.json").write_text((folders("llama") / "config.json").read_text())
    for listed, message in (({}, "names no files"), ({"a": "../secret.safetensors"}, "stay inside the folder")):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(CheckpointError, match=message):
            GPTModule(weights=tmp_path).configure_model()
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        GPTModule(weights=tmp_path).configure_model()


def test_bert_starts_from_a_folder(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    config = transformers.BertConfig(**options, intermediate_size=8, vocab_size=11, max_position_embeddings=8)
    model = transformers.BertForPreTraining(config)
    model.save_pretrained(tmp_path)
    module = BertModule(weights=tmp_path)
    module.configure_model()
    assert module.model is not None
    assert torch.equal(module.model.embed.word.weight, model.bert.embeddings.word_embeddings.weight)
