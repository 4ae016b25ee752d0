"""Names of special tokens in plain text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers

from megalight.cli.main import main
from megalight.data.indexed import IndexedDataset
from megalight.data.multimodal.images import VIDEO_TOKENS
from megalight.data.multimodal.template import FRAMES, IMAGE_TOKEN
from megalight.data.prepare import prepare
from megalight.data.tokenizer import MEDIA, Tokenizer

TEXT = "<user>a <image> b<end>\n<image>"
WORDS = "<user>a <image> b<end> <image><unk> ab"
SPECIAL = ["<unk>", "<user>", "<image>", "<end>"]


def trained() -> Tokenizer:
    """Special tokens are in the vocabulary of the model."""
    return Tokenizer.train([TEXT * 9], 270, special_tokens=SPECIAL[1:])


def added() -> Tokenizer:
    """They come behind it."""
    model = trained()._model
    plain = Model.from_str(Tokenizer.train(["a b " * 9], 258).to_json())
    plain.add_special_tokens([token.content for _, token in sorted(model.get_added_tokens_decoder().items())])
    return Tokenizer(plain)


def merged() -> Tokenizer:
    """A merge makes the name of a token, as tables of SentencePiece have it."""
    letters = sorted({*"<image>user nd\nab"})
    words = {*letters, "<i", "<im", "<ima", "<imag", "<image", "<image>", *SPECIAL}
    parts = [("<", "i"), ("<i", "m"), ("<im", "a"), ("<ima", "g"), ("<imag", "e"), ("<image", ">")]
    model = Model(models.BPE({word: number for number, word in enumerate(sorted(words))}, parts, unk_token="<unk>"))
    model.add_special_tokens(SPECIAL)
    return Tokenizer(model)


def pieces() -> Tokenizer:
    """A table of pieces would find the names by itself."""
    table = [(word, -1.0) for word in SPECIAL] + [(letter, -5.0) for letter in sorted({*"<image>user nd\nab"})]
    model = Model(models.Unigram(table, 0))
    model.add_special_tokens(SPECIAL)
    return Tokenizer(model)


def whole_words() -> Tokenizer:
    model = Model(models.WordLevel({word: k for k, word in enumerate([*SPECIAL, "a", "b"])}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(SPECIAL)
    return Tokenizer(model)


@pytest.mark.parametrize("make", [trained, added, merged, pieces, whole_words])
def test_no_text_stands_for_an_image(make: Any) -> None:
    tokenizer = make()
    image, user = tokenizer.vocabulary["<image>"], tokenizer.vocabulary["<user>"]
    usual, found = tokenizer.encode(TEXT), tokenizer.for_plain_text().encode(TEXT)
    assert (usual.count(image), usual.count(user)) == (2, 1)
    assert (found.count(image), found.count(user)) == (0, 1)
    others = tokenizer.encode("<user>a"), tokenizer.for_plain_text().encode("<user>a")
    assert others[0] == others[1]
    if make in (trained, added):  # others write spaces, and have no letters for all words
        assert tokenizer.decode(found) == tokenizer.decode(usual) == TEXT
    all_text = tokenizer.for_plain_text(special_as_text=True)
    assert not {*all_text.encode(WORDS)} & {tokenizer.vocabulary[token] for token in SPECIAL[1:]}
    assert all_text.encode("ab") == tokenizer.encode("ab")


def test_all_names_are_known() -> None:
    tokens = [token for token in MEDIA if any(token in frame.whole for frame in FRAMES)]
    assert len(tokens) == len(FRAMES)
    assert {IMAGE_TOKEN, *VIDEO_TOKENS, *tokens} == {*MEDIA}


def test_a_tokenizer_names_its_own_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["a b " * 9], 259, special_tokens=["<picture>"])
    assert tokenizer.for_plain_text() is tokenizer
    tokenizer.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "image_token": "<picture>"}))
    named = Tokenizer.load(tmp_path)
    assert named.identity == tokenizer.identity
    assert named.encode("<picture>") == [2]
    assert 2 not in named.for_plain_text().encode("<picture>")
    named.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").named["image_token"] == "<picture>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    trained().save(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in (TEXT, "a", "b<|endoftext|>"))
    )
    return tmp_path


def test_prepare_counts_what_texts_hold(folder: Path) -> None:
    options: Any = {"tokenizer": folder / "tokenizer", "progress": False}
    report = prepare([str(folder / "a.jsonl")], folder / "c", **options)
    assert report.special == {"<|endoftext|>": 1, "<user>": 1, "<end>": 1}
    tokenizer, data = Tokenizer.load(report.tokenizer), IndexedDataset(report.prefix)
    assert tokenizer.identity == trained().identity == report.meta.tokenizer_identity
    assert tokenizer.decode(data[0].tolist()) == TEXT + "<|endoftext|>"
    assert tokenizer.vocabulary["<image>"] not in data.tokens
    plain = prepare([str(folder / "a.jsonl")], folder / "p", special_as_text=True, workers=2, **options)
    assert plain.special == {}
    data = IndexedDataset(plain.prefix)
    assert [tokenizer.decode(data[k].tolist()) for k in range(3)] == [
        text + "<|endoftext|>" for text in (TEXT, "a", "b<|endoftext|>")
    ]
    assert [int((data[k] == tokenizer.eod_id).sum()) for k in range(3)] == [1, 1, 1]


def test_the_command_tells(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "prepare",
        str(folder / "a.jsonl"),
        "-q",
        "-o",
        str(folder / "c"),
        "--tokenizer",
        str(folder / "tokenizer"),
    ]
    assert main(words) == 0
    told = capsys.readouterr().err
    assert "the texts hold special tokens: <|endoftext|> 1, <user> 1, <end> 1. They stand for" in told
    assert main([*words, "--special-as-text"]) == 0
    assert not capsys.readouterr().err
    assert main([*words, "--special-as-text", "--chat"]) == 2
    assert "--special-as-text is for text" in capsys.readouterr().err
