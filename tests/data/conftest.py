"""A corpus and a tokenizer that tests of this folder share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalight.data.prepare import PrepareReport, prepare
from megalight.data.tokenizer import Tokenizer

WORDS = "the quick brown fox jumps over a lazy dog while many small models learn to read naïve text 東京 "


def documents(count: int = 60) -> list[str]:
    """Texts of different lengths."""
    return [f"Document {k}.\n" + WORDS * (1 + k % 7) + str(k * 7919) for k in range(count)]


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jsonl") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": k}) + "\n" for k, text in enumerate(documents())))
    return path


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(documents(), 300)


@pytest.fixture(scope="session")
def tokenizer_file(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer.save(tmp_path_factory.mktemp("tokenizer") / "t.json")


@pytest.fixture(scope="session")
def corpus(jsonl: Path, tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> PrepareReport:
    """60 documents with their tokenizer."""
    prefix = tmp_path_factory.mktemp("corpus") / "c"
    return prepare([str(jsonl)], prefix, tokenizer=tokenizer_file, progress=False)
