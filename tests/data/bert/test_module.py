"""The data module: batches on every rank, validation to the last sample, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.data.bert.batch import BertBatch
from megalight.data.bert.module import BertDataModule
from megalight.data.gpt.module import GPTDataModule
from megalight.data.prepare import PrepareReport, prepare
from megalight.errors import DataError
from tests.data.bert.conftest import texts
from tests.data.corpora import write


def module(report: PrepareReport, **options: Any) -> BertDataModule:
    defaults = {"data": report.prefix, "split": "30,10,0", "global_batch_size": 4, "sequence_length": 64}
    made = BertDataModule(**{**defaults, **options})
    made.setup("fit")
    return made


def read(loader: Any) -> list[BertBatch]:
    return list(loader)


def test_batches(sentences: PrepareReport) -> None:
    data = module(sentences)
    assert data.vocab_size == 320
    assert "tokenizer.json" in data.checkpoint_files()
    batches = read(data.train_dataloader())
    assert len(batches) > 5
    for batch in batches:
        assert isinstance(batch, BertBatch)
        assert len(batch) == 4
        assert max(batch.lengths) <= 64
        assert set(batch.order.tolist()) <= {0, 1}
    moved = data.transfer_batch_to_device(batches[0], torch.device("cpu"), 0)
    assert torch.equal(moved.tokens, batches[0].tokens)


def test_validation_reads_every_sample_once(sentences: PrepareReport) -> None:
    data = module(sentences)
    batches = read(data.val_dataloader())
    real = sum(int((batch.order >= 0).sum()) for batch in batches)
    dataset = data._datasets["validation"]
    assert dataset is not None
    assert real == len(dataset) > 5
    assert real % 4 != 0, "the last batch is filled up"
    assert batches[-1].lengths[-1] == 3
    assert (batches[-1].labels[-3:] == -100).all()


def test_workers_change_nothing(sentences: PrepareReport) -> None:
    alone, helped = (read(module(sentences, num_workers=n).train_dataloader()) for n in (0, 2))
    assert len(alone) == len(helped)
    for a, b in zip(alone, helped, strict=True):
        assert a.lengths == b.lengths
        for name in ("tokens", "labels", "order", "token_types"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def test_splits_and_blends(sentences: PrepareReport) -> None:
    data = module(sentences, data=None, train_data={sentences.prefix: 0.5}, val_data=sentences.prefix)
    assert read(data.train_dataloader())
    empty = module(sentences, split="1")
    assert empty.val_dataloader() == []


def test_what_does_not_fit_is_refused(sentences: PrepareReport, corpus: PrepareReport, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no token to begin a sample"):
        BertDataModule(data=corpus.prefix, global_batch_size=4, sequence_length=64)
    write(tmp_path / "flat", [4] * 50)
    with pytest.raises(DataError, match="--split-sentences"):
        module(sentences, data=str(tmp_path / "flat"), tokenizer=sentences.tokenizer)
    with pytest.raises(DataError, match="sequence_length is 3"):
        module(sentences, sequence_length=3)
    GPTDataModule(data=sentences.prefix, global_batch_size=4, sequence_length=64)  # the same files serve both


def test_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *letters, *(f"##{c}" for c in letters)]
    vocabulary = {piece: k for k, piece in enumerate([*pieces, "sentence", "says", "nothing"])}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path / "bert")
    (tmp_path / "a.txt").write_text(texts()[17])
    report = prepare(
        [str(tmp_path / "a.txt")], tmp_path / "a", tokenizer=tmp_path / "bert", split_sentences=True, progress=False
    )
    data = module(report, split="1", global_batch_size=1, sequence_length=512)
    (batch,) = read(data.train_dataloader())
    assert (batch.tokens[0], batch.tokens[-1]) == (2, 3)
    assert (batch.tokens == 3).sum() == 2, "the [SEP] that prepare put at the document's end is left out"
    hidden = batch.labels >= 0
    assert hidden.float().mean() == pytest.approx(0.15, abs=0.02)
    words = data.options.words.starts(batch.labels.where(hidden, batch.tokens).numpy())
    assert ((words[1:]) | (hidden[1:] == hidden[:-1]).numpy()).all(), "a word is hidden in part"
