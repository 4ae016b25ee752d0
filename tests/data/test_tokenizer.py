from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Model  # type: ignore[import-untyped]
from tokenizers import decoders, models, processors

from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError, HubError
from tests.data.conftest import documents


def config(folder: Path, **content: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def test_train(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 300
    assert (tokenizer.eod_id, tokenizer.pad_id, tokenizer.safe_pad_id) == (0, 1, 1)
    texts = ["the quick brown fox\n\n  def f():\t🙂", "", " leading"]
    ids = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(row) for row in ids] == texts
    assert ids == [tokenizer.encode(text) for text in texts]
    assert max(map(max, filter(None, ids))) < 300
    assert tokenizer.decode([0, *ids[0]], skip_special=True) == texts[0]
    assert tokenizer.decode([0]) == "<|endoftext|>"
    assert tokenizer.vocabulary["<|pad|>"] == 1


def test_text_after_other_text_is_what_both_have_more() -> None:
    """A tokenizer like that of Llama 2 marks where words begin, and drops the first mark of all that it decodes."""
    words = ["<unk>", "<s>", "\u2581the", "\u2581dog", "s", "<0xC3>", "<0xA9>"]
    model = Model(models.BPE(dict(zip(words, range(7), strict=True)), [], byte_fallback=True, unk_token="<unk>"))
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(spaces)
    model.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(model)
    assert (tokenizer.decode([2, 3]), tokenizer.decode([3])) == ("the dog", "dog")
    assert tokenizer.decode_after([2], [3, 4, 1]) == " dogs"
    assert tokenizer.decode_after([1], [3]) == tokenizer.decode_after([], [3]) == "dog"
    assert tokenizer.decode_after([2], [4]) == "s"
    assert tokenizer.decode_after([2, 5], [6]) == "\ufffd", "half a character before: its text changes, so alone"


@pytest.mark.parametrize("rule", [None, "$A", "<|pad|> $A", "<|pad|> $A <|endoftext|>"])
@pytest.mark.parametrize("stated", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
def test_texts_start_as_in_transformers(
    rule: str | None, stated: dict[str, bool], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = Model.from_str(tokenizer.to_json())
    if rule is not None:
        model.post_processor = processors.TemplateProcessing(rule, None, [("<|endoftext|>", 0), ("<|pad|>", 1)])
    model.save(str(tmp_path / "tokenizer.json"))
    config(
        tmp_path, tokenizer_class="PreTrainedTokenizerFast", bos_token="<|pad|>", eos_token="<|endoftext|>", **stated
    )
    found = Tokenizer.load(tmp_path)
    assert found.start == [1] * ("<|pad|>" in (rule or ""))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))("the lazy dog").input_ids
    assert theirs == found.start + found.encode("the lazy dog") + [0] * ("<|end" in (rule or ""))


def test_training_repeats(tokenizer: Tokenizer) -> None:
    assert Tokenizer.train(documents(), 300).identity == tokenizer.identity
    assert Tokenizer.train(documents(), 299).identity != tokenizer.identity


@pytest.mark.parametrize(("size", "message"), [(257, "at least 258"), (4096, "smaller vocab_size .* or more text")])
def test_bad_sizes(size: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Tokenizer.train(documents(), size)


@pytest.mark.parametrize("place", ["folder", "named.json", "deep/er/tokenizer.json"])
def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path, place: str) -> None:
    path = tokenizer.save(tmp_path / place)
    again = Tokenizer.load(path)
    assert again.identity == tokenizer.identity
    assert (again.eod_token, again.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert again.encode("the lazy dog") == tokenizer.encode("the lazy dog")
    assert Tokenizer.from_json(tokenizer.to_json()).identity == tokenizer.identity
    assert not [file for file in tmp_path.rglob("*") if file.suffix == ".tmp"]
    assert tokenizer.files().keys() == {"tokenizer.json", "tokenizer_config.json"}


def test_transformers_reads_what_is_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs.encode("the lazy dog", add_special_tokens=False) == tokenizer.encode("the lazy dog")
    assert theirs.eos_token_id == tokenizer.eod_id


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")  # of transformers' own call
def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    characters = ["<|endoftext|>", *"abcdefgĠ", "ab", "<x>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: k for k, token in enumerate(characters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    config(tmp_path, tokenizer_class="GPT2Tokenizer", pad_token="<x>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("cab") == [3, 9]
    assert (tokenizer.eod_id, tokenizer.safe_pad_id) == (0, 10)


def test_special_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    config(tmp_path, eos_token={"content": "<|endoftext|>"}, pad_token="<|endoftext|>")
    assert Tokenizer.load(tmp_path).safe_pad_id == -1  # it would take the loss from genuine ends
    config(tmp_path, bos_token="<|pad|>", pad_token="<|pad|>")
    assert Tokenizer.load(tmp_path).safe_pad_id == -1
    config(tmp_path)
    found = Tokenizer.load(tmp_path)
    assert (found.eod_id, found.pad_id, found.safe_pad_id) == (0, None, -1)  # a well-known name
    assert Tokenizer.load(tmp_path, eod_token="a").eod_token == "a"
    with pytest.raises(DataError, match="eod_token 'zzz' is not in"):
        Tokenizer.load(tmp_path, eod_token="zzz")


def test_truncation_and_templates_of_the_file_do_not_act(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = json.loads(tokenizer.to_json())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|pad|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [1], "tokens": ["<|pad|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("the lazy dog over there") == tokenizer.encode("the lazy dog over there")
    assert loaded.identity == tokenizer.identity


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; give a tokenizer"):
        Tokenizer.load(tmp_path / "none")
    with pytest.raises(HubError, match="some/model: HF_HUB_OFFLINE is set"):
        Tokenizer.load("some/model")
    (tmp_path / "tokenizer.json").write_text('{"model"')
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    for content in ("[]", "{"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(DataError, match=r"is not JSON|holds a list"):
            Tokenizer.load(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no tokenizer. Copy the files .* \(tokenizer.json"):
        Tokenizer.load(tmp_path)
    pytest.importorskip("transformers")
    (tmp_path / "added_tokens.json").write_text("{}")  # a part of one
    with pytest.raises(DataError, match=r"holds no tokenizer that can be read: .* Copy") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)
