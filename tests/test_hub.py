"""Names of the Hugging Face Hub, against a server on loopback: what is downloaded, once, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.text_files import find
from megalight.data.tokenizer import Tokenizer
from megalight.errors import HubError, MissingPackageError
from megalight.hub import hub_name, local
from megalight.models.gpt import GPT, GPTConfig, GPTModule
from megalight.models.hugging_face.export import export
from megalight.models.stored import held_model, open_model
from megalight.nn.init import initialize
from tests.support.hub import Hub, environment, read_from, serving

NAME = "tiny/llama"
WEIGHTS = {"config.json": b"{}", "model.safetensors": b"weights " * 1000}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server, an empty cache, and an empty working directory."""
    with serving() as server:
        monkeypatch.chdir(tmp_path)
        read_from(server, tmp_path, monkeypatch)
        yield server


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("Qwen/Qwen3-0.6B@v1.0", ("Qwen/Qwen3-0.6B", "v1.0")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", ("Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("hf://gpt2", ("gpt2", None)),
        ("hf://here/model@main", ("here/model", "main")),
        *[(path, None) for path in ("runs", "a/b/c", "./a", "/a/b", "../a", "s3://a/b", "~/a", "here/model")],
    ],
)
def test_names_are_told_from_paths(
    path: str, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    found = hub_name(path)
    assert (found and (found.repository, found.revision)) == expected
    assert found is not None or local(path) == path


def test_only_needed_files_are_downloaded_once(hub: Hub) -> None:
    extra = {"pytorch_model.bin": b"no", "model.gguf": b"no", "original/model.safetensors": b"no", "README.md": b"no"}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    parts = {name: name.encode() for name in index["weight_map"].values()}
    hub.add(NAME, files | parts | extra)
    folder = Path(local(NAME))
    assert {each.name for each in folder.iterdir()} == files.keys() | parts.keys()
    assert {name: (folder / name).read_bytes() for name in parts} == parts
    hub.served.clear()
    assert Path(local(NAME)) == folder
    assert latest_checkpoint(NAME) == folder
    assert not hub.served


def test_a_tokenizer_comes_without_weights(hub: Hub) -> None:
    tokenizer = Tokenizer.train(["some text for a vocabulary"], 260)
    hub.add(NAME, tokenizer.files() | WEIGHTS)
    assert Tokenizer.load(NAME).identity == tokenizer.identity
    assert "model.safetensors" not in hub.served


def test_a_revision_is_its_commit(hub: Hub) -> None:
    repository = hub.add(NAME, WEIGHTS, "main", "v1")
    hub.add(NAME, WEIGHTS | {"config.json": b'{"new": 1}'})
    for revision, expected in (("@v1", b"{}"), ("", b'{"new": 1}'), (f"@{repository.revisions['v1']}", b"{}")):
        assert (Path(local(NAME + revision)) / "config.json").read_bytes() == expected


def test_a_broken_download_resumes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add(NAME, WEIGHTS)
    hub.cut = 5000
    folder = Path(local(NAME))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS["model.safetensors"]
    assert hub.ranges == ["model.safetensors:5000"]


def test_offline_reads_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, WEIGHTS)
    folder = local(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.status = 500  # nobody asks
    assert local(NAME) == folder
    with pytest.raises(HubError, match=r"other/model: HF_HUB_OFFLINE is set, and the cache .* lacks it"):
        local("other/model")


def test_a_folder_in_the_form_of_the_cache_serves_offline(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    sha = "1" * 40
    snapshot = tmp_path / "hub" / "models--tiny--llama" / "snapshots" / sha
    snapshot.mkdir(parents=True)
    for name, data in WEIGHTS.items():
        (snapshot / name).write_bytes(data)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(sha)
    assert Path(local(NAME)) == snapshot
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set, and the cache .* lacks it or a part of it"):
        local(NAME)


def test_refusals_say_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, WEIGHTS)
    hub.add("gated/model", WEIGHTS).token = "secret"
    hub.add("bare/model", {"config.json": b"{}", "pytorch_model.bin": b"no"})
    for name, message in (
        ("no/model", r"no/model: nothing is at this path, and http.* has no model of this name, or it is private"),
        ("gated/model", r"access to it must be granted. Ask for it at http.*/gated/model, and give a token"),
        ("tiny/llama@v9", r"tiny/llama has no revision 'v9'"),
        ("tiny/lla--ma", r"it is no path and no name of the Hub"),
        ("hf://a/b/c", r"is no name of the Hugging Face Hub"),
        ("bare/model", r"bare/model holds no model.safetensors; models are read from config.json and safetensors"),
    ):
        with pytest.raises(HubError, match=message):
            local(name)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (Path(local("gated/model")) / "model.safetensors").is_file()


def test_files_of_a_data_set_are_inputs(hub: Hub) -> None:
    rows = {f"data/{split}-{number}.jsonl": b'{"text": "row"}\n' for split in ("train", "test") for number in range(2)}
    hub.add("tiny/text", rows | {"README.md": b"no", "data/audio.bin": b"no"}, kind="datasets")
    for given, names in (
        ("hf://datasets/tiny/text/data/train-*", ["train-0.jsonl", "train-1.jsonl"]),
        ("hf://datasets/tiny/text@main/data/test-1.jsonl", ["test-1.jsonl"]),
        ("tiny/text", [Path(name).name for name in sorted(rows)]),
    ):
        found = find([given])
        assert [each.path.name for each in found] == names
        assert {each.kind for each in found} == {"jsonl"}
    hub.add("tiny/other", {"README.md": b"no"}, kind="datasets")
    for given in ("hf://datasets/no/text", "no/text"):
        with pytest.raises(HubError, match=r"has no data set of this name"):
            find([given])
    with pytest.raises(HubError, match=r"no file of the data set matches data/dev"):
        find(["hf://datasets/tiny/other/data/dev-*"])


def test_a_full_disk_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.add(NAME, WEIGHTS)
    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", full)
        with pytest.raises(HubError, match=r"cannot be written to the cache .*the disk is full.*HF_HOME"):
            local(NAME)
    assert (Path(local(NAME)) / "model.safetensors").is_file()


def test_no_network_is_told(hub: Hub) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(HubError, match=r"does not answer \(.*Connection refused\).*HF_ENDPOINT"):
        local(NAME)


def test_without_the_package_the_extra_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match=r"nothing is at the path 'tiny/llama'.*'megalight\[hub\]'"):
        local(NAME)


def test_of_several_processes_one_downloads(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, WEIGHTS)
    script = f"from megalight.hub import local; print(local({NAME!r}))"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **environment(hub, tmp_path / "node"), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    folders = {process.communicate(timeout=60)[0] for process in started}
    assert len(folders) == 1
    assert dict(hub.served) == dict.fromkeys(WEIGHTS, 1)


def test_a_module_and_converters_start_from_a_name(hub: Hub, tmp_path: Path) -> None:
    config = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=32, max_sequence_length=16)
    model = GPT(config)
    initialize(model, 1, "model.")
    export(held_model("gpt", config, model), tmp_path / "folder")
    hub.add(NAME, tmp_path / "folder")
    module = GPTModule(weights=NAME)
    assert module.config.to_dict() == open_model(tmp_path / "folder").config.to_dict()
    source, expected = open_model(NAME).weights, open_model(tmp_path / "folder").weights
    assert source.tensors.keys() == expected.tensors.keys()
