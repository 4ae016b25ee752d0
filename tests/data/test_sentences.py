from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalight.data.encode import sentences_of
from megalight.data.indexed import IndexedDataset, IndexedWriter
from megalight.data.prepare import prepare
from megalight.data.text_files import Text
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two two!  Three?\nFour", ["One.", "Two two!", "Three?", "Four"]),
        ('He said: "Go away!" Then he left.', ['He said: "Go away!"', "Then he left."]),
        ("It cost 3.5 pounds, e.g. a lot. (Really?) Yes", ["It cost 3.5 pounds, e.g. a lot.", "(Really?)", "Yes"]),
        ("A heading\n\nand text\n \n\nthat goes on", ["A heading", "and text", "that goes on"]),
        ("東京。大阪！", ["東京。", "大阪！"]),
        ("no end", ["no end"]),
        (" \n\n ", [""]),
    ],
)
def test_rule(text: str, sentences: list[str]) -> None:
    found = list(sentences_of(Text(text, True)))
    assert [sentence.text for sentence in found] == sentences
    assert [sentence.ends for sentence in found] == [False] * (len(found) - 1) + [True]


def test_a_text_that_goes_on_ends_no_document() -> None:
    assert [sentence.ends for sentence in sentences_of(Text("One. Two.", False))] == [False, False]
    assert not list(sentences_of(Text(" ", False)))


def test_sentences_become_sequences_of_their_document(tmp_path: Path) -> None:
    texts = [f"Chapter {k}. It was dark. " + "The rain fell! " * k for k in range(5)]
    (tmp_path / "empty.txt").write_text("\n")
    for k, text in enumerate(texts):
        (tmp_path / f"{k}.txt").write_text(text)
    reports = [
        prepare(
            [str(tmp_path / "*.txt")],
            tmp_path / f"w{workers}" / "a",
            train_tokenizer=True,
            vocab_size=265,
            special_tokens=["[CLS]", "[SEP]", "[MASK]"],
            split_sentences=True,
            append_eod=workers == 1,
            workers=workers,
            progress=False,
        )
        for workers in (1, 2)
    ]
    for report, end in zip(reports, ("<|endoftext|>", ""), strict=True):
        tokenizer = Tokenizer.load(report.tokenizer)
        assert [tokenizer.vocabulary[token] for token in ("[CLS]", "[SEP]", "[MASK]")] == [2, 3, 4]
        data = IndexedDataset(report.prefix)
        assert report.meta.num_documents == data.num_documents == 5
        assert report.empty == 1
        assert data.documents.tolist() == [0, 2, 5, 9, 14, 20]
        decoded = [tokenizer.decode(data[k].tolist()) for k in range(5, 9)]
        assert decoded == ["Chapter 2.", "It was dark.", "The rain fell!", "The rain fell!" + end]


def test_counts_that_do_not_add_up(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", "uint16") as writer:
        writer.add_documents(np.arange(6), [1, 2, 3], [1, 2])
        with pytest.raises(DataError, match="4 sequences, but 3 sequences were"):
            writer.add_documents(np.arange(6), [1, 2, 3], [2, 2])
    assert IndexedDataset(tmp_path / "a").documents.tolist() == [0, 1, 3]
