"""Damaged and hostile folders of ``transformers``: the command names the file, writes nothing, runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from megalight.cli.main import main

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Llama."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=8)
    folder = tmp_path_factory.mktemp("models") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path(self.path),)


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def option(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def data(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes())) and None


def index(name: object) -> Callable[[Path], None]:
    """An index, and no single file, which would be read in its place."""

    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        text("model.safetensors.index.json", json.dumps({"weight_map": {"lm_head.weight": name}}))(folder)

    return change


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(str(folder / "sprung"))))


def disguised(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Trap(str(folder / "sprung"))))


def ends_later(content: bytes) -> bytes:
    """The header says that the last tensor is longer than the file."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    last = max((each for name, each in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"][1])
    last["data_offsets"][1] *= 1000
    last["shape"] = [1000 * last["shape"][0], *last["shape"][1:]]
    again = json.dumps(header).encode()
    return len(again).to_bytes(8, "little") + again + content[8 + size :]


def steering(content: bytes) -> bytes:
    """A name that would clear the screen of who reads the message."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["\x1b[2J"] = header.pop("model.norm.weight")
    again = json.dumps(header).encode()
    return len(again).to_bytes(8, "little") + again + content[8 + size :]


def sparse(folder: Path) -> None:
    """More than the memory, and nothing on the disk."""
    (folder / "tokenizer.json").touch()
    os.truncate(folder / "tokenizer.json", 1 << 40)


BAD = {
    "no JSON": (text("config.json", "{"), r"config\.json is not JSON"),
    "a list": (text("config.json", "[]"), r"config\.json holds a list"),
    "brackets": (text("config.json", "[" * 100_000), r"config\.json is not JSON"),
    "a word": (option(hidden_size="wide"), 'hidden_size is "wide"; it must be an integer'),
    "null": (option(num_hidden_layers=None), "num_hidden_layers is null; it must be an integer"),
    "another kind": (option(model_type="t5"), "t5"),
    "other sizes": (
        option(vocab_size=21),
        r"\[20, 8\] and \[21, 8\]",
    ),
    "broken settings": (text("generation_config.json", "{"), r"generation_config\.json is not JSON"),
    "odd tokens": (option(eos_token_id="</s>"), None),
    "climbs": (index("../llama/model.safetensors"), r"file name '\.\./llama/model\.safetensors'"),
    "absolute": (index("/etc/passwd"), "file name '/etc/passwd'"),
    "a number": (index(3), "file name 3"),
    "not there": (index("model-2.safetensors"), r"model-2\.safetensors does not exist"),
    "layers without end": (option(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000; at most 10000"),
    "layers of a part": (option(text_config={"num_hidden_layers": 10**12}), "num_hidden_layers is 1000000000000; at m"),
    "experts without end": (
        option(model_type="mixtral", num_local_experts=10**9),
        "num_local_experts is 1000000000; at most 10000",
    ),
    "layers of nothing": (
        option(num_hidden_layers=9000),
        "llama describes a model of 9000 layers and experts, and holds 12 tensors or matrices",
    ),
    "layers of experts without end": (
        option(model_type="mixtral", num_hidden_layers=10**4, num_local_experts=10**4, num_experts_per_tok=2),
        "num_layers=10000 times moe.num_experts=10000 is 100000000; it must be at most 262144",
    ),
    "experts of nothing": (
        option(model_type="mixtral", num_hidden_layers=50, num_local_experts=5000, num_experts_per_tok=2),
        "describes a model of 250000 layers and experts, and holds 12 tensors or matrices",
    ),
    "a huge tokenizer": (sparse, r"tokenizer\.json has 1099511627776 bytes; at most 104857600 are read"),
    "steers": (data(steering), r"\\x1b\[2J has no counterpart"),
    "truncated": (data(lambda content: content[:-1]), r"model\.safetensors cannot be read as safetensors"),
    "longer": (data(lambda content: content + b"x"), r"model\.safetensors cannot be read as safetensors"),
    "empty": (data(lambda content: b""), r"model\.safetensors cannot be read as safetensors"),
    "huge header": (data(lambda content: b"\xff" * 8 + content[8:]), r"model\.safetensors cannot be read as safet"),
    "lies": (data(ends_later), r"model\.safetensors cannot be read as safetensors"),
    "pickle": (pickled, r"model\.safetensors does not exist; weights are only read from safetensors"),
    "disguised": (disguised, r"model\.safetensors cannot be read as safetensors"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_folder_is_refused(case: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = BAD[case]
    folder = tmp_path / "llama"
    shutil.copytree(whole, folder)
    change(folder)
    code = main(["convert", str(folder), str(tmp_path / "out"), "--to", "transformers", "--quiet"])
    if message is None:
        assert code == 0
        return
    said = " ".join(capsys.readouterr().err.split())  # lines break where the path ends
    assert code == 2, said
    assert re.search(message, said), said
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
    assert not (folder / "sprung").exists()


def test_names_do_not_steer_the_terminal(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(whole, folder)
    data(steering)(folder)
    for words in (["inspect", str(folder)], ["inspect", str(folder), "--diff", str(whole)]):
        main(words)
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        assert "\\x1b[2J" in out + err


@pytest.mark.parametrize("words", [["convert"], ["convert", "--to", "transformers"], ["merge", "--output"]], ids=str)
def test_what_is_there_stays(words: list[str], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the source itself: a slip must not cost a folder."""
    for output in (whole, tmp_path, whole / "config.json" / "below"):
        (tmp_path / "letter.txt").write_text("dear all")
        before = {path.name: path.read_bytes() for path in whole.iterdir()}
        assert main([words[0], str(whole), *words[1:], str(output)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "is there already" in said or "is not a folder where this user may write" in said
        assert {path.name: path.read_bytes() for path in whole.iterdir()} == before
        assert (tmp_path / "letter.txt").read_text() == "dear all"
