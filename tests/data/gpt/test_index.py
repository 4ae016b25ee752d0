from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalight.data.gpt.dataset import SamplePlan, build, sample_index
from megalight.errors import DataError

LENGTHS = np.array([3, 5, 4, 6], np.int32)
GOLDEN = [
    (4, [2, 1, 0, 3], [3, 1, 0, 2]),
    (5, [2, 1, 0, 3, 3, 1, 0, 2], [3, 1, 0, 2, 5, 4, 7, 6]),
    (8, [2, 1, 0, 2, 3, 1, 0, 3], [3, 5, 7, 4, 2, 1, 0, 6]),
]


@pytest.mark.parametrize(("samples", "documents", "shuffle"), GOLDEN)
def test_golden(samples: int, documents: list[int], shuffle: list[int]) -> None:
    plan = SamplePlan.make(18, 4, samples)
    arrays = build(LENGTHS, range(4), plan, seed=7)
    assert arrays["document_index"].tolist() == documents
    assert arrays["shuffle_index"].tolist() == shuffle
    fourth = [4, 0] if samples == 8 else [3, 4]
    assert arrays["sample_index"][:5].tolist() == [[0, 0], [1, 0], [1, 4], [3, 0], fourth]
    assert plan.num_epochs == (1 if samples == 4 else 2)
    assert plan.separate_final_epoch == (samples == 5)
    assert arrays["document_index"].dtype == arrays["sample_index"].dtype == np.int32
    assert arrays["shuffle_index"].dtype == np.uint32


def walk(lengths: list[int], s: int, drop_last_partial: bool) -> list[list[tuple[int, int]]]:
    """Token by token: the (position in the order, offset) of every token of every sample."""
    tokens = [(row, offset) for row, length in enumerate(lengths) for offset in range(length)]
    samples = []
    for start in range(0, len(tokens) - 1, s):
        sample = tokens[start : start + s + 1]
        if len(sample) == s + 1 or not drop_last_partial:
            samples.append(sample)
    return samples


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda found: sum(found) > 1),
    s=st.integers(1, 12),
    epochs=st.integers(1, 3),
    drop=st.booleans(),
)
def test_samples_are_those_of_a_walk_over_the_tokens(lengths: list[int], s: int, epochs: int, drop: bool) -> None:
    expected = walk(lengths * epochs, s, drop)
    total = sum(lengths) * epochs - 1
    plan = SamplePlan(sum(lengths), s, epochs, False, total // s if drop else -(-total // s))
    order = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    rows = sample_index(np.array(lengths, np.int32), order, plan)
    assert len(rows) == len(expected) + 1
    for row, sample in zip(rows[1:].tolist(), expected, strict=True):
        assert tuple(row) == sample[-1]
    assert rows[0].tolist() == [0, 0]
    for row, sample in zip(rows[1:-1].tolist(), expected[1:], strict=True):
        assert tuple(row) == sample[0]  # neighbors share a token


@given(p=st.integers(2, 10**12), s=st.integers(1, 10**5), n=st.integers(1, 10**9))
def test_plan_rules(p: int, s: int, n: int) -> None:
    plan = SamplePlan.make(p, s, n)
    e = plan.num_epochs
    assert e * p >= n * s + 1
    assert e == 1 or (e - 1) * p < n * s + 1
    assert plan.num_samples == (e * p - 1) // s >= n
    before = ((e - 1) * p - 1) // s
    assert plan.separate_final_epoch == (e > 1 and n - before < int(0.8 * ((p - 1) // s)))


def test_counts_of_large_data_are_exact() -> None:
    p = 3 * 2**24 + 1  # float32 would round this
    assert SamplePlan.make(p, 1, None, drop_last_partial=False).num_samples == p - 1
    assert SamplePlan.make(p, 2, None, drop_last_partial=False).num_samples == (p - 1) // 2
    assert SamplePlan.make(p + 1, 2, None, drop_last_partial=False).num_samples == (p - 1) // 2 + 1


@given(samples=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_every_document_comes_once_per_epoch_and_every_sample_once(samples: int, seed: int) -> None:
    plan = SamplePlan.make(18, 4, samples)
    arrays = build(LENGTHS, range(4), plan, seed)
    order = arrays["document_index"]
    assert np.bincount(order).tolist() == [plan.num_epochs] * 4
    assert sorted(arrays["shuffle_index"].tolist()) == list(range(plan.num_samples))
    if plan.separate_final_epoch:
        assert sorted(order[-4:].tolist()) == [0, 1, 2, 3]
        first = plan.samples_before_final_epoch
        assert sorted(arrays["shuffle_index"][:first].tolist()) == list(range(first))


def test_documents_of_a_split_keep_their_numbers() -> None:
    plan = SamplePlan.make(10, 3, None)
    arrays = build(np.array([1, 1, 4, 6, 9], np.int32), range(2, 4), plan, 0)
    assert sorted(arrays["document_index"].tolist()) == [2, 3]
    assert arrays["sample_index"].shape == (4, 2)


def test_too_short() -> None:
    with pytest.raises(DataError, match="hold 4 tokens; one sample of sequence_length 4 takes 5"):
        SamplePlan.make(4, 4, None)
    with pytest.raises(DataError, match="at least 2 tokens"):
        SamplePlan.make(1, 4, 10)
    assert SamplePlan.make(2, 4, None, drop_last_partial=False).num_samples == 1
    assert SamplePlan.make(3, 4, 10).num_epochs == 14


def test_a_hundred_million_tokens_take_a_moment() -> None:
    lengths = np.full(200_000, 500, np.int32)
    start = time.process_time()
    arrays = build(lengths, range(len(lengths)), SamplePlan.make(10**8, 2048, None), 1)
    assert len(arrays["shuffle_index"]) == (10**8 - 1) // 2048
    assert time.process_time() - start < 5
