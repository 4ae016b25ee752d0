from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel.layout import (
    ALIGNMENT,
    SHARD_ALIGNMENT,
    BucketKey,
    default_bucket_size,
    level_of,
    plan_buckets,
)
from megalight.parallel.mesh import ParallelMesh

KINDS = [BucketKey(torch.bfloat16, torch.float32, 0), BucketKey(torch.bfloat16, torch.float32, 1)]


@settings(max_examples=60)
@given(
    params=st.lists(st.tuples(st.integers(1, 900), st.sampled_from(KINDS)), max_size=20),
    world=st.integers(1, 5),
    bucket_size=st.integers(1, 2000),
)
def test_every_parameter_has_one_aligned_place(
    params: list[tuple[int, BucketKey]], world: int, bucket_size: int
) -> None:
    mesh = ParallelMesh(world)
    sizes, kinds = [size for size, _ in params], [replace(kind, mesh=mesh) for _, kind in params]
    buckets = plan_buckets(sizes, kinds, bucket_size)
    places = [slot.index for bucket in buckets for slot in bucket.slots]
    assert sorted(places) == list(range(len(sizes)))
    for bucket in buckets:
        position = 0
        for slot in bucket.slots:
            assert (slot.numel, kinds[slot.index]) == (sizes[slot.index], bucket.kind)
            assert slot.start % ALIGNMENT == 0
            assert position <= slot.start < position + ALIGNMENT
            position = slot.stop
        assert [slot.index for slot in bucket.slots] == sorted((slot.index for slot in bucket.slots), reverse=True)
        assert all(slot.stop < bucket_size for slot in bucket.slots[:-1])
        assert bucket.numel % (world * SHARD_ALIGNMENT) == 0
        assert position <= bucket.numel < position + world * SHARD_ALIGNMENT
        edges = [bucket.interval(rank) for rank in range(world)]
        assert edges[0][0] == 0
        assert edges[-1][1] == bucket.numel
        assert all(left[1] == right[0] for left, right in pairwise(edges))
        assert len({stop - start for start, stop in edges}) == 1
    completed_by = [bucket.slots[-1].index for bucket in buckets]
    assert completed_by == sorted(completed_by, reverse=True)


def test_golden_layout() -> None:
    """Three parameters of 100, 30 and 200 elements, two ranks: the last comes first and fills a bucket."""
    first, second = plan_buckets([100, 30, 200], [replace(KINDS[0], mesh=ParallelMesh(2))] * 3, 150)
    assert [(slot.index, slot.start, slot.stop) for slot in first.slots] == [(2, 0, 200)]
    assert first.numel == 256
    assert [(slot.index, slot.start, slot.stop) for slot in second.slots] == [(1, 0, 30), (0, 64, 164)]
    assert second.numel == 256
    assert second.interval(1) == (128, 256)  # parameter 0 straddles the ranks


def test_small_buckets_at_the_edge() -> None:
    """The first 150 elements as registered, which are reduced last, lie in buckets of at least 50."""
    sizes = [40, 30, 60, 90, 80]

    def places(edge: int | None) -> list[list[int]]:
        return [[s.index for s in bucket.slots] for bucket in plan_buckets(sizes, [KINDS[0]] * 5, 150, edge)]

    assert places(None) == [[4, 3], [2, 1, 0]]
    assert places(50) == [[4, 3], [2], [1, 0]]
    assert places(1) == [[4, 3], [2], [1], [0]]


def test_a_large_bucket_closes_where_the_edge_begins() -> None:
    sizes = [20, 100, 90]
    places = [[s.index for s in bucket.slots] for bucket in plan_buckets(sizes, [KINDS[0]] * 3, 120, 30)]
    assert places == [[2], [1], [0]]


def test_default_bucket_grows_with_the_ranks() -> None:
    assert default_bucket_size(8) == 40_000_000
    assert default_bucket_size(64) == 64_000_000


@pytest.mark.parametrize("name", ["zero1", "full"])
def test_levels_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.*must be one of no_shard, optim"):
        level_of(name)
