"""A corpus of sentences with a tokenizer for masking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalight.data.bert.dataset import Words
from megalight.data.prepare import PrepareReport, prepare
from megalight.data.tokenizer import Tokenizer

SPECIALS = ["[CLS]", "[SEP]", "[MASK]"]


def texts(count: int = 40) -> list[str]:
    """Documents of 1 to 9 sentences, no two of which are alike."""
    return [
        " ".join(f"Sentence {n} of text {k} says nothing much, {'really ' * ((k + n) % 4)}." for n in range(1 + k % 9))
        for k in range(count)
    ]


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> PrepareReport:
    """40 documents, split into sentences; each document ends with the end-of-document token."""
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return prepare(
        [str(folder / "a.jsonl")],
        folder / "a",
        train_tokenizer=True,
        vocab_size=320,
        special_tokens=SPECIALS,
        split_sentences=True,
        progress=False,
    )


@pytest.fixture(scope="session")
def pair_tokenizer(sentences: PrepareReport) -> Tokenizer:
    return Tokenizer.load(Path(sentences.tokenizer))


@pytest.fixture(scope="session")
def words(pair_tokenizer: Tokenizer) -> Words:
    return Words.of(pair_tokenizer)
