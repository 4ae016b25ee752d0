from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.data.gpt.dataset import GPTDataset, SampleOptions, make_sample
from megalight.errors import DataError
from tests.data.corpora import write


def options(s: int, **more: object) -> SampleOptions:
    return SampleOptions(sequence_length=s, **more)  # type: ignore[arg-type]


def test_golden_samples(tmp_path: Path) -> None:
    data = write(tmp_path / "a", [3, 5, 4, 6])
    dataset = GPTDataset(data, range(4), options(4), num_samples=4, seed=7)
    # documents in the order 2, 1, 0, 3: tokens 8-11, 3-7, 0-2, 12-17; samples of 4 + 1 that share a token
    stream = [8, 9, 10, 11, 3, 4, 5, 6, 7, 0, 1, 2, 12, 13, 14, 15, 16, 17]
    assert len(dataset) == 4
    for index, sample in enumerate([3, 1, 0, 2]):
        item = dataset[index]
        assert item.tokens.tolist() == stream[4 * sample : 4 * sample + 4]
        assert item.labels.tolist() == stream[4 * sample + 1 : 4 * sample + 5]
        assert item.loss_mask.tolist() == [1, 1, 1, 1]
        assert item.document_lengths is None
    for index in (4, -1):
        with pytest.raises(IndexError):
            dataset[index]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda found: sum(found) > 1),
    s=st.integers(1, 10),
    seed=st.integers(0, 99),
)
def test_one_pass_reads_every_token(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], s: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("gpt")
    data = write(folder / "a", lengths)
    dataset = GPTDataset(data, range(len(lengths)), options(s, document_mask=True), seed=seed, drop_last_partial=False)
    stream = np.concatenate([data[document] for document in dataset.document_index]).tolist()
    where = {token: document for document in range(len(data)) for token in data[document].tolist()}
    for index in range(len(dataset)):
        start = int(dataset.shuffle_index[index]) * s
        item = dataset[index]
        have = len(stream[start + 1 : start + s + 1])
        assert item.labels[:have].tolist() == stream[start + 1 : start + s + 1]
        assert item.loss_mask.tolist() == [1] * have + [0] * (s - have)
        assert item.tokens[:have].tolist() == stream[start : start + have]
        assert item.document_lengths is not None
        assert sum(item.document_lengths) == s
        expected = [where[token] for token in stream[start : start + s]]
        runs = [where_ for k, where_ in enumerate(expected) if k == 0 or where_ != expected[k - 1]]
        real = item.document_lengths[: len(runs)]
        assert [document for document, n in zip(runs, real, strict=True) for _ in range(n)] == expected


def test_documents_of_a_split(tmp_path: Path) -> None:
    data = write(tmp_path / "a", [4, 4, 4, 4])
    dataset = GPTDataset(data, range(1, 3), options(3), label="validation", drop_last_partial=False)
    seen = {
        int(token) for index in range(len(dataset)) for token in dataset[index].tokens[dataset[index].loss_mask > 0]
    }
    assert seen < set(range(4, 12))
    assert len(dataset) == 3


def test_masks() -> None:
    text = [np.array([5, 9, 6, 7]), np.array([9, 8])]
    sample = make_sample(text, options(5, eod_id=9, eod_mask_loss=True, document_mask=True))
    assert sample.tokens.tolist() == [5, 9, 6, 7, 9]
    assert sample.labels.tolist() == [9, 6, 7, 9, 8]
    assert sample.loss_mask.tolist() == [1, 0, 1, 1, 0]  # by input, not by label
    assert sample.document_lengths == (4, 1)
    again = make_sample(text, options(5))
    assert again.loss_mask.tolist() == [1] * 5  # nothing is shared between samples


def test_padding_is_known_by_position() -> None:
    sample = make_sample([np.array([0, 3, 0])], options(5, document_mask=True))
    assert sample.tokens.tolist() == [0, 3, 0, 0, 0]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 0]
    assert sample.document_lengths == (3, 2)
    empty = make_sample([], options(3, document_mask=True))
    assert empty.tokens.tolist() == [0, 0, 0]
    assert empty.loss_mask.tolist() == [0, 0, 0]
    assert empty.document_lengths == (3,)


def test_padding_in_the_data() -> None:
    text = [np.array([4, 2, 2, 6, -1, -1], np.int32)]
    sample = make_sample(text, options(5, pad_id=2))
    assert sample.tokens.tolist() == [4, 2, 2, 6, 0]  # a token of the vocabulary stays; an impossible one becomes 0
    assert sample.labels.tolist() == [2, 2, 6, 0, 0]
    assert sample.loss_mask.tolist() == [0, 0, 1, 0, 0]
    assert make_sample(text, options(5)).loss_mask.tolist() == [1, 1, 1, 0, 0]


def test_ids_outside_the_vocabulary() -> None:
    with pytest.raises(DataError, match="token id 7; the vocabulary has 7"):
        make_sample([np.array([1, 7])], options(1, vocab_size=7))
    with pytest.raises(DataError, match="eod_mask_loss needs"):
        options(1, eod_mask_loss=True)


def test_none_is_a_sample_without_loss(tmp_path: Path) -> None:
    dataset = GPTDataset(write(tmp_path / "a", [9]), range(1), options(4))
    assert dataset[None].loss_mask.sum() == 0


def test_pickle_maps_again(tmp_path: Path) -> None:
    dataset = GPTDataset(write(tmp_path / "a", [5] * 2000), range(2000), options(4), seed=3)
    blob = pickle.dumps(dataset)
    assert len(blob) < 2000
    again = pickle.loads(blob)
    assert all(np.array_equal(again[k].tokens, dataset[k].tokens) for k in range(0, len(dataset), 100))


def test_order_and_cache_depend_on_what_matters(tmp_path: Path) -> None:
    data = write(tmp_path / "a", [5] * 20)

    def order(**changes: object) -> str:
        given = {"num_samples": 10, "seed": 1, **changes}
        return GPTDataset(data, range(20), options(4), **given).order  # type: ignore[arg-type]

    assert order() == order(num_samples=24)  # more samples of the same pass
    assert len({order(), order(seed=2), order(num_samples=30)}) == 3
    assert len(list((tmp_path / "cache").glob("*-GPTDataset-train"))) == 3
    order(cache_dir=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere").is_dir()


def test_errors_name_the_split(tmp_path: Path) -> None:
    data = write(tmp_path / "a", [3, 3])
    with pytest.raises(DataError, match=r"train split of .*a: the documents hold 6 tokens.*sequence_length 8 takes 9"):
        GPTDataset(data, range(2), options(8))
    floats = write(tmp_path / "f", [9], "float32")
    with pytest.raises(DataError, match="token ids are integers"):
        GPTDataset(floats, range(1), options(2))
