from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megalight.cli.main import main
from megalight.data.chat.module import SFTDataModule
from megalight.data.chat.prepare import prepare_chat
from megalight.data.corpus import Corpus
from megalight.data.gpt.module import GPTDataModule
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from tests.data.chat.conftest import MARKED, PLAIN, chat

ROWS = [chat(f"question {k}", f"the answer is {k * k}", "sure?", "yes") for k in range(9)]


def test_tokens_and_mask(prepared, tmp_path: Path) -> None:
    report = prepared(ROWS, template=MARKED)
    corpus = Corpus.open(report.prefix)
    tokenizer = Tokenizer.load(report.tokenizer)
    assert corpus.kind == "chat"
    assert tokenizer.chat_template == MARKED
    assert len(corpus.data) == 9
    assert corpus.loss is not None
    ids, loss = corpus.data[4], corpus.loss[4]
    assert tokenizer.decode(ids.tolist()).startswith("<s><|im_start|>user\nquestion 4<|im_end|>")
    assert tokenizer.decode(ids[loss == 1].tolist()) == "the answer is 16<|im_end|>yes<|im_end|>"
    assert report.meta.num_loss_tokens == sum(int(corpus.loss[k].sum()) for k in range(9))
    assert f"{report.meta.num_loss_tokens:,} count in the loss" in str(report)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_messages_that_are_marked_are_not_learned(template: str, prepared) -> None:
    """Per message, in every shape of rows, and so in the labels of packed rows."""
    said = [("user", "u", 1), ("assistant", "one", 0), ("user", "v", None), ("assistant", "two", 1), ("user", "w", 0)]
    said.append(("assistant", "six", None))
    turns = [{"from": role, "value": text, "train": mark is None or bool(mark)} for role, text, mark in said]
    marked = [{"role": role, "content": text, "weight": mark} for role, text, mark in said]
    rows = [{"messages": marked}, {"conversations": turns}, {"prompt": marked[:1], "completion": marked[1:]}]
    plain = [{"messages": [{"role": role, "content": text} for role, text, _ in said]}]
    report, other = prepared(rows, template=template), prepared(plain, "plain", template=template)
    corpus, unmarked = Corpus.open(report.prefix), Corpus.open(other.prefix)
    assert corpus.loss is not None
    decode = Tokenizer.load(report.tokenizer).decode
    end = "<|im_end|>" if template == MARKED else "<|im_end|>\n"
    for index in range(3):
        assert corpus.data[index].tolist() == unmarked.data[0].tolist()
        assert decode(corpus.data[index][corpus.loss[index] == 1].tolist()) == f"two{end}six{end}"
    data = SFTDataModule(data=report.prefix, split="1", global_batch_size=1, sequence_length=128)
    row = data.dataset(data.parts["train"][0], "train", 1)[0]
    assert decode(row.labels[row.loss_mask == 1].tolist()) == f"two{end}six{end}"
    last = Corpus.open(prepared(rows[:1], "last", template=template, train_on="last").prefix)
    assert last.loss is not None
    assert decode(last.data[0][last.loss[0] == 1].tolist()) == f"six{end}"


@pytest.mark.full
def test_workers_do_not_matter(prepared, tmp_path: Path) -> None:
    one, two = prepared(ROWS, "one"), prepared(ROWS, "two", workers=2)
    for suffix in (".bin", ".idx", ".loss.bin", ".loss.idx"):
        assert Path(one.prefix + suffix).read_bytes() == Path(two.prefix + suffix).read_bytes()


def test_parquet_rows_equal_json_rows(prepared, tmp_path: Path, chat_tokenizer: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    other = prepare_chat(
        [str(tmp_path / "rows.parquet")], tmp_path / "p", tokenizer=chat_tokenizer, workers=1, progress=False
    )
    assert Path(f"{other.prefix}.bin").read_bytes() == Path(f"{prepared(ROWS).prefix}.bin").read_bytes()


def test_preference_pairs_are_documents_of_two(prepared) -> None:
    rows = [{"prompt": f"question {k}", "chosen": "yes", "rejected": "no, " * k} for k in range(5)]
    report = prepared(rows)
    corpus = Corpus.open(report.prefix)
    assert corpus.kind == "pairs"
    assert corpus.data.documents.tolist() == [0, 2, 4, 6, 8, 10]
    assert corpus.loss is not None
    tokenizer = Tokenizer.load(report.tokenizer)
    answers = [tokenizer.decode(corpus.data[k][corpus.loss[k] == 1].tolist()) for k in (6, 7)]
    assert answers == ["yes<|im_end|>\n", "no, no, no, <|im_end|>\n"]
    with pytest.raises(DataError, match="was prepared as 'pairs'; GPTDataModule reads data of the kinds 'text'"):
        GPTDataModule(data=report.prefix, global_batch_size=1, sequence_length=8)
    way = r"SFTDataModule reads .*Corpus\.open reads them.*prepare rows of 'prompt' and 'completion'"
    with pytest.raises(DataError, match=way):
        SFTDataModule(data=report.prefix, global_batch_size=1, sequence_length=8)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "u"}]}, "no token of the assistant to learn from"),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\]\.content is 1"),
        (
            {"messages": [*chat("u", "a")["messages"][:1], {"role": "assistant", "content": "a", "weight": 0}]},
            "weight 0",
        ),
        (chat("u", "a") | {"image": "a.png"}, r"has images \(key 'image'\), and --chat reads none.*--multimodal"),
        (chat("u", "a") | {"images": ["a.png"]}, r"has images \(key 'images'\)"),
        (
            {"prompt": "u", "chosen": "a", "rejected": "b"},
            "of the kind 'pairs', and the first row is of the kind 'chat'",
        ),
    ],
)
def test_bad_rows(prepared, tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(DataError, match=rf"c\.jsonl line 10.*{message}"):
        prepared([*ROWS, row])
    assert not list(tmp_path.glob("c.*bin"))


def test_an_empty_list_of_images_is_none(prepared) -> None:
    assert prepared([chat("u", "a") | {"images": [], "image": None}]).meta.num_documents == 1


def test_text_has_no_rows(tmp_path: Path, chat_tokenizer: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"PNG")
    with pytest.raises(DataError, match=r"a\.png has no rows by its name; .*--format"):
        prepare_chat([str(tmp_path / "a.png")], tmp_path / "p", tokenizer=chat_tokenizer, progress=False)


def test_bad_rows_can_be_skipped(prepared) -> None:
    report = prepared([{"messages": 1}, *ROWS, {"prompt": "u", "chosen": "a", "rejected": "b"}], on_bad="skip")
    assert report.meta.num_documents == 9
    assert [message.partition(".jsonl ")[2][:7] for message in report.skipped] == ["line 1:", "line 11"]


def test_half_of_a_surrogate_pair_is_a_bad_row(prepared) -> None:
    report = prepared([chat("\ud800", "yes"), *ROWS], on_bad="skip")
    assert report.meta.num_documents == 9
    assert "line 1: a text is not Unicode: character" in report.skipped[0]


def test_the_command(tmp_path: Path, chat_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "t.jinja").write_text(PLAIN)
    words = ["prepare", str(tmp_path / "c.jsonl"), "-o", str(tmp_path / "out"), "--tokenizer", str(chat_tokenizer)]
    chat_words = ["--chat", "--chat-template", str(tmp_path / "t.jinja"), "--train-on", "last", "--workers=1", "-q"]
    assert main([*words, *chat_words]) == 0
    assert "count in the loss" in capsys.readouterr().out
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.loss is not None
    decode = Tokenizer.load(chat_tokenizer).decode
    assert decode(corpus.data[3][np.flatnonzero(corpus.loss[3])].tolist()) == "yes<|im_end|>\n"
    assert main([*words, "--train-on", "last"]) != 0
    assert "--train-on is for conversations; add --chat" in capsys.readouterr().err
    assert main([*words, "--chat", "--text-key", "body"]) != 0
    assert "--text-key is for text, not for conversations" in capsys.readouterr().err


def test_damaged_masks(prepared, tmp_path: Path) -> None:
    report, other = prepared(ROWS), prepared(ROWS[:4], "d")
    for suffix in (".loss.bin", ".loss.idx"):
        Path(report.prefix + suffix).write_bytes(Path(other.prefix + suffix).read_bytes())
    with pytest.raises(DataError, match="their sequences differ in length"):
        Corpus.open(report.prefix)
    Path(report.prefix + ".loss.idx").unlink()
    with pytest.raises(DataError, match=r"loss\.idx does not exist"):
        Corpus.open(report.prefix)
