"""Samples of segment pairs: which sentences, in which order, hidden how."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megalight.data.bert.dataset import BertDataset, PairOptions, Words, collate, make_pair, runs_of, sample_runs
from megalight.data.indexed import IndexedDataset
from megalight.data.prepare import PrepareReport
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from tests.data.corpora import write


def one_by_one(lengths: list[int], documents: list[int], target: int) -> list[list[int]]:
    """The rule of ``runs_of`` without short samples, one sentence at a time."""
    runs = []
    for begin, end in itertools.pairwise(documents):
        first = begin
        while end - first >= 2:
            last, total = first, 0
            while last < end and (total < target or last - first < 2):
                total += lengths[last]
                last += 1
            last = end if end - last == 1 else last
            runs.append([first, last])
            first = last
    return runs


@pytest.mark.parametrize("target", [2, 7, 20, 1000])
def test_runs_are_those_of_the_rule(target: int) -> None:
    generator = np.random.default_rng(target)
    documents = np.concatenate([[0], np.cumsum(generator.integers(0, 12, 60))])
    lengths = generator.integers(1, 9, documents[-1]).astype(np.int32)
    runs = runs_of(lengths, documents, target, 0.0, generator)
    assert runs.tolist() == one_by_one(lengths.tolist(), documents.tolist(), target)


def test_short_samples_and_passes() -> None:
    documents, lengths = np.array([0, 1000]), np.full(1000, 3, np.int32)
    plain = sample_runs(lengths, documents, 30, 0.0, None, 1)
    assert len(plain) == 100
    assert sorted(plain[:, 0].tolist()) == list(range(0, 1000, 10))
    short = sample_runs(lengths, documents, 30, 0.5, None, 1)
    sizes = np.diff(short, axis=1)[:, 0]
    assert 0.3 < (sizes < 10).mean() < 0.6
    assert sorted(k for first, last in short.tolist() for k in range(first, last)) == list(range(1000))
    several = sample_runs(lengths, documents, 30, 0.0, 250, 1)
    assert len(several) == 250
    assert np.array_equal(several[:100], plain)
    assert Counter(several[:, 0].tolist()).most_common(1)[0][1] == 3
    assert not np.array_equal(several[100:200], plain)


def options(words: Words, length: int = 48) -> PairOptions:
    return PairOptions(sequence_length=length, words=words, eod_id=0)


def restored(sample, tokenizer: Tokenizer) -> list[str]:
    """The two segments of a sample as text, with what was hidden."""
    tokens = np.where(sample.labels >= 0, sample.labels, sample.tokens)
    first, second, nothing = tokenizer.decode(tokens[1:].tolist()).split("[SEP]")
    assert nothing == ""
    return [first, second]


def test_samples(sentences: PrepareReport, pair_tokenizer: Tokenizer, words: Words) -> None:
    data = IndexedDataset(sentences.prefix)
    dataset = BertDataset(data, range(len(data)), options(words, 400))
    documents = [np.concatenate([data[k] for k in range(a, b)]) for a, b in itertools.pairwise(data.documents)]
    texts = [pair_tokenizer.decode(ids.tolist()).removesuffix("<|endoftext|>") for ids in documents]
    orders = Counter()
    for index in range(len(dataset)):
        sample = dataset[index]
        assert sample.tokens[0] == words.classify
        first, second = restored(sample, pair_tokenizer)
        joined = second + first if sample.order else first + second
        assert any(joined in text for text in texts)
        ends = np.flatnonzero(sample.tokens == words.separate)
        assert sample.token_types.tolist() == [0] * (ends[0] + 1) + [1] * (ends[1] - ends[0])
        assert (sample.labels >= 0).any()
        orders[sample.order] += 1
    assert len(dataset) == 35  # documents of two sentences or more
    assert 8 < orders[1] < 27


def test_long_pairs_lose_tokens_of_the_longer_segment(words: Words) -> None:
    text = np.arange(10, 210, dtype=np.uint16)
    seen = set()
    for seed in range(40):
        generator = np.random.default_rng(seed)
        sample = make_pair([text[:190], text[190:]], options(words, 43), generator)
        assert len(sample.tokens) == 43
        tokens = np.where(sample.labels >= 0, sample.labels, sample.tokens)
        ends = np.flatnonzero(tokens == words.separate)
        segments = [tokens[1 : ends[0]], tokens[ends[0] + 1 : ends[1]]]
        longer, shorter = segments[:: -1 if sample.order else 1]
        assert np.array_equal(shorter, text[190:])
        assert np.array_equal(longer, np.arange(longer[0], longer[0] + 30))
        seen.add(int(longer[0]))
    assert len(seen) > 10


def test_samples_depend_on_seed_and_number_alone(sentences: PrepareReport, words: Words, tmp_path: Path) -> None:
    data = IndexedDataset(sentences.prefix)
    first = BertDataset(data, range(len(data)), options(words), num_samples=100)
    again = pickle.loads(pickle.dumps(first))
    other = BertDataset(data, range(len(data)), options(words), num_samples=100, seed=5, cache_dir=tmp_path)
    assert first.order == again.order != other.order
    same = [[np.array_equal(first[k].tokens, dataset[k].tokens) for k in (99, 0, 7)] for dataset in (again, other)]
    assert same == [[True] * 3, [False] * 3]
    batch = collate([first[k] for k in range(5)])
    assert batch.lengths == tuple(len(first[k].tokens) for k in range(5))
    assert len(batch.tokens) == len(batch.labels) == len(batch.token_types) == sum(batch.lengths)
    assert batch.order.tolist() == [first[k].order for k in range(5)]
    with pytest.raises(IndexError, match="sample 100 of 100"):
        first[100]


def test_a_split_is_whole_documents(sentences: PrepareReport, words: Words) -> None:
    data = IndexedDataset(sentences.prefix)
    begin, end = int(data.documents[10]), int(data.documents[20])
    dataset = BertDataset(data, range(begin, end), options(words), label="validation")
    assert dataset.runs.min() == data.documents[10] + 0  # document 10 has two sentences
    assert dataset.runs.max() == end
    owner = np.searchsorted(data.documents, dataset.runs[:, 0], side="right")
    assert (dataset.runs[:, 1] <= data.documents[owner]).all()


def test_what_cannot_be_paired_is_refused(words: Words, tmp_path: Path) -> None:
    data = write(tmp_path / "a", [4] * 20)  # one sentence per document
    with pytest.raises(DataError, match=r"train split of .*none of 20 documents has two sentences.*--split-sentences"):
        BertDataset(data, range(20), options(words))
    with pytest.raises(DataError, match="sequence_length is 4"):
        options(words, 4)
    with pytest.raises(DataError, match=r"mask_probability is 1\.5"):
        PairOptions(sequence_length=9, words=words, mask_probability=1.5)
    with pytest.raises(DataError, match="token ids 2 to 999"):
        make_pair([np.array([999]), np.array([3])], options(words), np.random.default_rng(0))
