"""The tokenizer of a run is found by the configuration that was written beside its checkpoints."""

import pytest
import yaml

from megalight.cli.checkpoints import tokenizer_of_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder with a checkpoint of one file; paths are relative to the folder that it was started in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.tokenizer.json").write_text("{}")
    checkpoint = tmp_path / "version_0" / "checkpoints" / "a.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    return checkpoint


def configure(run, content):
    (run.parents[1] / "config.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))


@pytest.mark.parametrize(
    "data",
    [
        {"data": "data/text"},
        {"data": {"data/other": 1.0, "data/text": 2.0}},
        {"data": None, "tokenizer": None, "train_data": ["data/other", "data/text.bin"]},
        {"data": "data/other", "tokenizer": "data/text.tokenizer.json"},
    ],
)
def test_the_given_one_then_that_of_the_data(run, data):
    configure(run, {"data": {"class_path": "GPTDataModule", "init_args": data}})
    assert str(tokenizer_of_run(run)) == "data/text.tokenizer.json"
    configure(run, {"data": data})  # a command with one kind of data writes no class
    assert str(tokenizer_of_run(run)) == "data/text.tokenizer.json"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1",
        "data: 3",
        {"data": {"init_args": {"data": "elsewhere/text", "tokenizer": "gone.json"}}},
        {"data": {"data": [0.5, 0.5]}},
    ],
)
def test_nothing_is_guessed(run, content):
    assert tokenizer_of_run(run) is None
    configure(run, content)
    assert tokenizer_of_run(run) is None
