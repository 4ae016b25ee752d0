from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalight.data.blend import BlendedDataset, BlendPart, Data, Mixture, Samples, mix
from megalight.data.corpus import Corpus, same_tokenizer
from megalight.data.gpt.dataset import GPTDataset, GPTSample, SampleOptions
from megalight.data.prepare import PrepareReport, prepare
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from tests.data.conftest import documents
from tests.data.corpora import write


@pytest.mark.parametrize(
    ("data", "prefixes", "weights"),
    [
        ("a", ("a",), None),
        (["a", "b"], ("a", "b"), None),
        (["0.3", "a", "0.7", "b"], ("a", "b"), (0.3, 0.7)),
        ([3, "a", 7.5, "b"], ("a", "b"), (3.0, 7.5)),
        ({"a": 1, "b": 2.5}, ("a", "b"), (1.0, 2.5)),
        (["a"], ("a",), None),
        (Path("a"), ("a",), None),
        ([Path("a"), Path("b")], ("a", "b"), None),
        ({Path("a"): "1"}, ("a",), (1.0,)),
    ],
)
def test_parse(data: Data, prefixes: tuple[str, ...], weights: tuple[float, ...] | None) -> None:
    assert Mixture.parse(data) == Mixture(prefixes, weights)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "at least one"),
        ({}, "at least one"),
        (["a", "a"], "each only once"),
        (["0.3", "a", "0.7"], "must alternate"),
        (["0.3", "a", "b", "c"], "must alternate"),
        (["0", "a", "1", "b"], "above 0"),
        ({"a": -1, "b": 1}, r"blend weights are \[-1.0, 1.0\]; each must be a number above 0"),
        ({"a": "x", "b": 1}, r"data is {'a': 'x', 'b': 1}; its values are weights, which must be numbers above 0"),
        ({"a": None}, "must be numbers above 0"),
        (["a", "./a"], "each only once"),
        (["a", "a.bin"], "each only once"),
        ("", "data is ''; it must name at least one data prefix"),
    ],
)
def test_parse_bad(data: Data, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Mixture.parse(data)


def build(parts: list[BlendPart], num_samples: int | None = None, drop: bool = True) -> Samples[GPTSample] | None:
    options = SampleOptions(sequence_length=4)

    def dataset(part: BlendPart, samples: int | None) -> GPTDataset:
        return GPTDataset(
            part.corpus.data, part.documents, options, num_samples=samples, seed=1, drop_last_partial=drop
        )

    return mix(parts, dataset, num_samples=num_samples, label="train", cache_dir=None)


def parts(folder: Path, weights: tuple[float | None, ...], lengths: tuple[list[int], ...]) -> list[BlendPart]:
    """Corpus ``k`` holds the tokens from ``1000 k`` on."""
    found = []
    for k, (weight, sizes) in enumerate(zip(weights, lengths, strict=True)):
        data = write(folder / f"p{k}", sizes, first=1000 * k)
        found.append(BlendPart(Corpus(data, None), range(len(sizes)), weight))
    return found


def sources(dataset: Samples[GPTSample] | None) -> list[int]:
    assert dataset is not None
    return [int(dataset[index].tokens[0]) // 1000 for index in range(len(dataset))]


def test_weights_and_a_number_of_samples(tmp_path: Path) -> None:
    dataset = build(parts(tmp_path, (0.25, 0.75), ([17], [9])), 40)
    assert isinstance(dataset, BlendedDataset)
    assert np.bincount(sources(dataset)).tolist() == [10, 30]  # the second is read more than once


def test_weights_without_a_number_stop_before_a_repetition(tmp_path: Path) -> None:
    dataset = build(parts(tmp_path, (1, 1), ([4 * 10 + 1], [4 * 3 + 1])))
    assert sources(dataset) == [0, 1] * 3 + [0]


def test_no_weights(tmp_path: Path) -> None:
    given = parts(tmp_path, (None, None), ([4 * 6 + 1], [4 * 2 + 1]))
    assert np.bincount(sources(build(given))).tolist() == [6, 2]
    assert np.bincount(sources(build(given, 80))).tolist() == [59, 21]  # in proportion to their tokens, 25 to 9


def test_empty_parts_take_no_part(tmp_path: Path) -> None:
    given = parts(tmp_path, (1, 1, 1), ([9], [], [1]))
    assert isinstance(build(given), GPTDataset)
    assert build(given[1:]) is None


def test_the_last_tokens_count_in_evaluation(tmp_path: Path) -> None:
    dataset = build(parts(tmp_path, (None, None), ([6], [2])), drop=False)
    assert dataset is not None
    assert sum(float(dataset[index].loss_mask.sum()) for index in range(len(dataset))) == 5 + 1


def test_corpus_checks(corpus: PrepareReport, tokenizer: Tokenizer, jsonl: Path, tmp_path: Path) -> None:
    opened = Corpus.open(corpus.prefix)
    opened.check_tokenizer(tokenizer)
    opened.check_vocabulary(300, "the model")
    assert opened.tokenizer_path == corpus.tokenizer
    other = Tokenizer.train(documents(), 310)
    with pytest.raises(DataError, match="the same ids mean different text"):
        opened.check_tokenizer(other)
    highest = corpus.meta.max_token_id
    with pytest.raises(DataError, match=rf"token id {highest}, but the model allows {highest}"):
        opened.check_vocabulary(highest, "the model")
    second = prepare([str(jsonl)], tmp_path / "d", tokenizer=other.save(tmp_path / "t.json"), progress=False)
    with pytest.raises(DataError, match="made with different tokenizers"):
        same_tokenizer([opened, Corpus.open(second.prefix)])
    foreign = Corpus.open(write(tmp_path / "f", [9]).prefix)
    assert foreign.meta is None
    assert foreign.tokenizer_path is None
    foreign.check_tokenizer(other)
    with pytest.raises(DataError, match="token id 8, but it allows 8"):
        foreign.check_vocabulary(8, "it")  # small files are read
    assert same_tokenizer([foreign, opened]) == corpus.meta
    assert same_tokenizer([foreign]) is None


def test_facts_of_another_data_set(corpus: PrepareReport, tmp_path: Path) -> None:
    write(tmp_path / "x", [9])
    (tmp_path / "x.json").write_bytes(Path(corpus.prefix + ".json").read_bytes())
    with pytest.raises(DataError, match="belong to different data sets"):
        Corpus.open(tmp_path / "x")
