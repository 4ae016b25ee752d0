"""The dimensions of recorded steps: lists and rule are those of Megatron."""

from __future__ import annotations

import pytest

from megalight.inference.batch_dimensions import (
    CUDAGraphBatchDimensionBuilder,
    InferenceBatchDimensions,
    match_graph_config,
)

D = InferenceBatchDimensions


def builder(count: int, requests: int = 32, length: int = 4096, tokens: int = 64, mixed: int = 16) -> list[D]:
    return CUDAGraphBatchDimensionBuilder(count, requests, length, tokens, mixed).build()


@pytest.mark.parametrize(
    ("count", "largest", "expected"),
    [
        (4, 1000, [1000, 768, 512, 256]),
        (16, 256, [*range(256, 0, -16)]),
        (1, 64, [64]),
        (16, 3, [3]),
        (3, 10, [10, 8]),
    ],
)
def test_token_counts(count: int, largest: int, expected: list[int]) -> None:
    assert CUDAGraphBatchDimensionBuilder(count, 1, 1).token_counts(largest) == expected


def test_the_list_has_decode_mixed_and_prefill_graphs_the_largest_first() -> None:
    small = [D(4, 0, 4), D(2, 0, 2), D(1, 0, 1)]
    assert builder(2) == [
        D(64, 32, 0),
        D(64, 16, 16),
        D(32, 32, 0),
        D(32, 16, 16),
        D(32, 0, 32),
        D(16, 0, 16),
        *small,
    ]
    # 16 prompts of a step leave no place for others, and 100 tokens need 4 sequences of 33
    assert builder(1, requests=16, tokens=100) == [D(100, 16, 0), D(16, 0, 16), *small]
    assert builder(1, requests=8, length=34, tokens=100, mixed=2) == [
        D(100, 8, 0),
        D(8, 0, 8),
        *small,
    ]
    # 16 prompts do not fit into 8 tokens
    assert builder(1, requests=64, tokens=8) == [D(64, 0, 64), *small]
    assert builder(2, mixed=0) == [D(32, 0, 32), D(16, 0, 16), *small]


def test_the_smallest_graph_that_serves_is_taken() -> None:
    graphs = [D(64, 32, 0), D(64, 16, 16), D(32, 16, 16), D(32, 0, 32), D(16, 0, 16), D(4, 0, 4)]
    for real, expected in [
        (D(3, 0, 3), D(4, 0, 4)),
        (D(17, 0, 17), D(32, 0, 32)),
        (D(33, 0, 33), None),  # graphs with prefill serve no step without
        (D(20, 1, 3), D(32, 16, 16)),
        (D(40, 16, 16), D(64, 16, 16)),
        (D(40, 17, 3), D(64, 32, 0)),
        (D(40, 2, 20), D(64, 16, 16)),  # places for prefill take sequences that decode
        (D(65, 2, 3), None),
        (D(64, 20, 13), None),
    ]:
        assert match_graph_config(real, graphs) == expected, real
    assert match_graph_config(D(40, 2, 20), graphs, strict=True) is None
    assert match_graph_config(D(40, 2, 16), graphs, strict=True) == D(64, 16, 16)
