"""Models in remote storage: converted both ways, started from, generated from; half a folder is no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from megalight import checkpoint
from megalight.checkpoint.disk import publish
from megalight.checkpoint.disk.address import Address
from megalight.cli.main import main
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, StorageError
from megalight.models.gpt.module import GPTModule
from megalight.models.hugging_face import folder as folders
from megalight.models.hugging_face.export import export
from megalight.models.stored import open_model
from megalight.parallel.source import Target
from tests.inference.test_text import TEXT, build, save
from tests.models.test_gpt_megatron import LLAMA, arguments, theirs, weights
from tests.models.test_gpt_megatron import save as save_megatron

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def store() -> Iterator[Address]:
    made = Address(f"memory://{uuid4().hex}")
    yield made
    publish.delete(made)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with its tokenizer."""
    folder = Tokenizer.train([TEXT], 264).save(tmp_path / "tokenizer")
    save(tmp_path / "a.ckpt", build(), files={path.name: path.read_bytes() for path in folder.iterdir()})
    return tmp_path / "a.ckpt"


def convert(*words: object) -> None:
    assert main(["convert", *map(str, words), "--quiet"]) == 0


def values(path: object) -> dict[str, torch.Tensor]:
    opened = checkpoint.open(str(path))
    found = {name: torch.empty(info.shape) for name, info in opened.tensors.items() if name.startswith("model.")}
    opened.fill([Target(n, tuple(t.shape), (0,) * t.ndim, t) for n, t in found.items()], strict=False)
    return found


def test_models_go_to_a_store_and_back(saved: Path, store: Address, capsys: pytest.CaptureFixture[str]) -> None:
    convert(saved, store / "hf")
    assert {each.name for each in (store / "hf").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    convert(store / "hf", store / "b.ckpt")
    convert(store / "b.ckpt", store / "c.ckpt", "--to", "fsdp_dtensor")
    convert(store / "c.ckpt", saved.parent / "d.ckpt", "--to", "checkpoint", "--average", store / "b.ckpt")
    before, after = values(saved), values(saved.parent / "d.ckpt")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    said = []
    for path in (saved, store / "hf", store / "b.ckpt"):
        capsys.readouterr()
        assert main(["generate", str(path), "-n", "5", "--seed", "3", "-p", "ab"]) == 0
        said.append(capsys.readouterr().out)
    assert len(set(said)) == 1
    module = GPTModule(weights=str(store / "hf"))
    assert module.config == open_model(store / "hf").config
    source = module.initial_weights()
    assert source is not None
    assert source.tensors.keys() == before.keys()
    assert "tokenizer.json" in folders.companions(str(store / "hf"))


def test_a_folder_of_megatron_in_a_store(tmp_path: Path, store: Address) -> None:
    ours = weights(LLAMA)
    save_megatron(tmp_path / "run", theirs(LLAMA, ours), arguments(LLAMA))
    store.store.put(str(tmp_path / "run"), f"{store.key}/run", recursive=True)
    convert(store / "run", tmp_path / "a.ckpt")
    found = values(tmp_path / "a.ckpt")
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in ours.items())


def test_half_a_folder_is_no_model(saved: Path, store: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    send = type(store.store).open

    def refuse(self: Any, name: str, *rest: Any, **named: Any) -> Any:
        if name.endswith("config.json"):
            raise OSError(28, "quota exceeded")
        return send(self, name, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(type(store.store), "open", refuse)
        with pytest.raises(CheckpointError, match="quota exceeded"):
            export(open_model(saved), str(store / "hf"))
    assert not (store / "hf").exists()
    export(open_model(saved), str(store / "hf"))
    with pytest.raises(CheckpointError, match=r"hf is there already"):
        export(open_model(saved), str(store / "hf"))
    export(open_model(saved), str(store / "hf"), overwrite=True)
    assert folders.is_folder(str(store / "hf"))
    (store / "hf").store.rm_file((store / "hf" / "config.json").key)
    assert not folders.is_folder(str(store / "hf"))


def test_a_store_that_does_not_answer_has_no_other_model(store: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(type(store.store), "info", refuse)
    with pytest.raises(StorageError, match="no route to host"):
        GPTModule(weights=str(store / "hf"))
