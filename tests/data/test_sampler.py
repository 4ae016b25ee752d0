from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalight.data.sampler import GlobalBatchSampler, check_sizes
from megalight.errors import DataError, LayoutError


def batches(sampler: GlobalBatchSampler) -> list[list[int | None]]:
    found = list(sampler)
    return [found[k : k + sampler.share] for k in range(0, len(found), sampler.share)]


@given(
    samples=st.integers(1, 60),
    share=st.integers(1, 4),
    ranks=st.integers(1, 4),
    start=st.integers(0, 5),
    pad=st.booleans(),
)
def test_ranks_together_read_what_one_would(samples: int, share: int, ranks: int, start: int, pad: bool) -> None:
    size = share * ranks
    if samples < size and not pad:
        return
    samplers = [
        GlobalBatchSampler(samples, size, rank=rank, num_replicas=ranks, start=lambda: (0, start), pad=pad)
        for rank in range(ranks)
    ]
    full = samples // size if not pad else -(-samples // size)
    assert {len(sampler) for sampler in samplers} == {full * share}  # the whole pass, whatever is done already
    together = [[item for part in parts for item in part] for parts in zip(*map(batches, samplers), strict=True)]
    expected = [
        [sample if sample < samples else None for sample in range(k * size, (k + 1) * size)] for k in range(start, full)
    ]
    assert together == expected


def test_start_is_asked_each_time() -> None:
    position = [(0, 3)]
    sampler = GlobalBatchSampler(10, 2, start=lambda: position[0])
    assert list(sampler) == [6, 7, 8, 9]
    position[0] = (1, 0)
    second = list(sampler)
    assert sorted(second) == list(range(10))
    position[0] = (2, 0)
    third = list(sampler)
    assert second != third != list(range(10))
    position[0] = (1, 3)
    assert list(sampler) == second[6:]  # in the same order when it resumes within a later pass


def test_later_passes_depend_on_the_seed_and_not_on_the_rank() -> None:
    def second(seed: int, **place: int) -> list[int]:
        return list(GlobalBatchSampler(40, 4, start=lambda: (1, 0), seed=seed, **place))

    whole = second(1)
    halves = [second(1, rank=rank, num_replicas=2) for rank in range(2)]
    assert [whole[k : k + 2] for k in range(0, 40, 4)] == [halves[0][k : k + 2] for k in range(0, 20, 2)]
    assert [whole[k : k + 2] for k in range(2, 40, 4)] == [halves[1][k : k + 2] for k in range(0, 20, 2)]
    assert whole != second(2)


def test_bad() -> None:
    with pytest.raises(LayoutError, match="global_batch_size is 6 and there are 4 data-parallel ranks"):
        GlobalBatchSampler(100, 6, rank=1, num_replicas=4)
    with pytest.raises(DataError, match="3 samples, fewer than one global batch of 4"):
        GlobalBatchSampler(3, 4)
    assert len(GlobalBatchSampler(3, 4, pad=True)) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0; it must be at least 1"),
        ({"sequence_length": -1}, "sequence_length is -1; it must be at least 1"),
        ({"num_workers": -1}, "num_workers is -1; it must be at least 0"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 4294967295"),
        ({"seed": 2**32}, "seed is 4294967296; it must be from 0"),
        ({"train_samples": 0}, "train_samples is 0; it must be at least 1, or left out"),
        ({"train_samples": -3}, "train_samples is -3"),
        ({"val_samples": -1}, "val_samples is -1; it must be at least 0, which reads none"),
        ({"test_samples": -1}, "test_samples is -1"),
    ],
)
def test_sizes_that_no_data_can_have(given: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_sizes(**given)


def test_sizes_that_data_can_have() -> None:
    check_sizes(global_batch_size=1, sequence_length=1, seed=2**32 - 1, train_samples=1, val_samples=0, test_samples=0)
