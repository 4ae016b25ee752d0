from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalight.data.chat.dataset import PackedDataset, PackOptions
from megalight.data.chat.module import SFTDataModule
from megalight.data.corpus import Corpus
from megalight.data.gpt.dataset import GPTSample
from megalight.data.multimodal.module import MultimodalDataModule
from megalight.data.prepare import prepare
from megalight.errors import ConfigurationError, DataError
from tests.data.chat.conftest import chat

ROWS = [chat("q" * (1 + k % 5), f"the answer is {k}" * (1 + k % 3)) for k in range(24)]
S = 64


@pytest.fixture
def corpus(prepared) -> Corpus:
    return Corpus.open(prepared(ROWS).prefix)


def build(corpus: Corpus, tmp_path: Path, **options) -> PackedDataset:
    own = {key: options.pop(key) for key in ("num_samples", "seed", "label") if key in options}
    pack = PackOptions(**{"sequence_length": S, **options})
    return PackedDataset(corpus, range(len(corpus.data)), pack, cache_dir=tmp_path / "cache", **own)


def pieces(sample: GPTSample) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, labels and mask of each document of a row."""
    assert sample.document_lengths is not None
    assert sum(sample.document_lengths) == len(sample.tokens)
    cuts = np.cumsum(sample.document_lengths)[:-1]
    parts = (np.split(values, cuts) for values in (sample.tokens, sample.labels, sample.loss_mask))
    return [tuple(part.tolist() for part in piece) for piece in zip(*parts, strict=True)]


def test_every_conversation_is_whole_and_occurs_once(corpus: Corpus, tmp_path: Path) -> None:
    data = build(corpus, tmp_path)
    assert len(data) < 24  # several share a row
    found = [piece for index in range(len(data)) for piece in pieces(data[index]) if any(piece[2])]
    assert corpus.loss is not None
    expected = [
        (corpus.data[k][:-1].tolist(), corpus.data[k][1:].tolist(), corpus.loss[k][1:].tolist()) for k in range(24)
    ]
    assert sorted(found) == sorted(expected)
    padding = data[None]
    assert not padding.loss_mask.any()
    assert padding.document_lengths == (S,)


def test_without_packing_each_has_a_row(corpus: Corpus, tmp_path: Path) -> None:
    data = build(corpus, tmp_path, packing=False)
    assert len(data) == 24
    assert all(len(pieces(data[index])) <= 2 for index in range(24))


def test_each_pass_has_an_order_of_its_own(corpus: Corpus, tmp_path: Path) -> None:
    one, three = build(corpus, tmp_path), build(corpus, tmp_path, num_samples=2 * len(build(corpus, tmp_path)) + 1)
    n = len(one)
    assert len(three) == 3 * n
    assert one.order == three.order  # a longer run continues with the same rows
    rows = [three[index].tokens.tolist() for index in range(3 * n)]
    assert rows[:n] == [one[index].tokens.tolist() for index in range(n)]
    assert rows[n : 2 * n] != rows[:n]
    assert sorted(rows[n : 2 * n]) == sorted(rows[2 * n :]) == sorted(rows[:n])
    assert pickle.loads(pickle.dumps(three))[n + 1].tokens.tolist() == rows[n + 1]
    other = build(corpus, tmp_path, seed=5)
    assert other.order != one.order
    with pytest.raises(IndexError):
        one[n]


@pytest.mark.parametrize(("rule", "start"), [("cut_end", True), ("cut_start", False)])
def test_cut(corpus: Corpus, tmp_path: Path, rule: str, start: bool, caplog: pytest.LogCaptureFixture) -> None:
    longest = int(corpus.data.lengths.max())
    with caplog.at_level(logging.WARNING):
        data = build(corpus, tmp_path, sequence_length=longest - 3, too_long=rule)
    assert f"conversations have more than {longest - 2} tokens" in caplog.text
    k = int(corpus.data.lengths.argmax())
    kept = corpus.data[k][:-2] if start else corpus.data[k][2:]
    held = [piece for index in range(len(data)) for piece in pieces(data[index])]
    assert (kept[:-1].tolist(), kept[1:].tolist()) in [piece[:2] for piece in held]


def test_what_a_cut_leaves_without_an_answer_is_left_out(prepared, tmp_path: Path) -> None:
    corpus = Corpus.open(prepared([chat("q" * 300, "a"), chat("q", "a")]).prefix)
    assert len(build(corpus, tmp_path).items) == 1
    assert len(build(corpus, tmp_path, too_long="cut_start").items) == 2
    assert len(build(corpus, tmp_path, too_long="drop").items) == 1
    with pytest.raises(DataError, match=r"1 conversations are too long, such as number 0 with \d+ tokens"):
        build(corpus, tmp_path, too_long="raise")
    with pytest.raises(DataError, match="no conversation can be used with sequence_length 8"):
        build(corpus, tmp_path, sequence_length=8)
    with pytest.raises(ConfigurationError, match="too_long is 'cut'; it must be one of"):
        PackOptions(sequence_length=8, too_long="cut")  # type: ignore[arg-type]


def test_rows_of_other_loss_masks_are_others(prepared, tmp_path: Path) -> None:
    """As many tokens with a loss, in the same conversations: what a cut leaves depends on where they are."""
    report = prepared([chat("q" * 300, "a"), chat("q", "a")])
    corpus = Corpus.open(report.prefix)
    assert len(build(corpus, tmp_path).items) == 1
    masks = np.fromfile(f"{report.prefix}.loss.bin", np.uint8)
    first = int(corpus.data.lengths[0])
    masks[:first] = masks[:first][::-1].copy()
    masks.tofile(f"{report.prefix}.loss.bin")
    assert len(build(Corpus.open(report.prefix), tmp_path).items) == 2


def test_text_is_mixed_in_and_all_of_it_counts(prepared, tmp_path: Path, chat_tokenizer: Path) -> None:
    report = prepared(ROWS)
    (tmp_path / "text.txt").write_text("what is the question " * 40)
    text = prepare([str(tmp_path / "text.txt")], tmp_path / "text", tokenizer=chat_tokenizer, progress=False)
    plain = Corpus.open(text.prefix)
    data = build(plain, tmp_path)
    joined = np.concatenate([data.corpus.data.get(k, first, size) for k, first, size in sorted(data.items.tolist())])
    assert joined.tolist() == plain.data[0][:-1].tolist()
    assert all(piece[2] == [1.0] * len(piece[2]) or not any(piece[2]) for piece in pieces(data[0]))
    module = SFTDataModule(
        data=[3, report.prefix, 1, text.prefix], split="100,0,0", global_batch_size=4, sequence_length=S
    )
    module.samples["train"] = 16
    module.setup("fit")
    batch = next(iter(module.train_dataloader()))
    assert int((batch.loss_mask.mean(1) > 0.9).sum()) == 1  # one row in four is text


@pytest.mark.parametrize("kind", [SFTDataModule, MultimodalDataModule])
def test_text_alone_is_refused(kind: Any, tmp_path: Path, chat_tokenizer: Path) -> None:
    (tmp_path / "text.txt").write_text("what is the question " * 40)
    text = prepare([str(tmp_path / "text.txt")], tmp_path / "text", tokenizer=chat_tokenizer, progress=False)
    for how in ({"data": text.prefix}, {"train_data": text.prefix, "val_data": text.prefix}):
        with pytest.raises(DataError, match=f"text was prepared as 'text', which {kind.__name__} only mixes in"):
            kind(**how, global_batch_size=4, sequence_length=S)


def test_ids_outside_the_vocabulary(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the vocabulary has 20 tokens"):
        build(corpus, tmp_path, vocab_size=20)[0]
