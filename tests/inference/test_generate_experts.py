"""Generation where replicas share experts: each completes its own prompts, and some are done before others."""

from __future__ import annotations

from typing import Any

import pytest

import megalight
from megalight.inference import ParallelGPT, generate
from megalight.nn.init import initialize
from tests.parallel.expert.model import build
from tests.support.workers import run

REQUESTS: list[tuple[list[list[int]], int]] = [
    ([[5, 6, 7], [8]], 3),
    ([[9, 10, 11, 12, 13]], 9),
    ([[1], [2], [3]], 1),
    ([[4, 4], [6, 6, 6]], 5),
]


def ask(model: Any, replica: int) -> list[list[int]]:
    prompts, count = REQUESTS[replica]
    return generate(model, prompts, max_new_tokens=count, temperature=0)


def _generate(degrees: dict[str, int]) -> tuple[int, list[list[int]], list[list[int]]]:
    root = build().double().to("meta")
    layout = megalight.Layout(sequence_parallel="tensor_parallel" in degrees, **degrees)
    split = megalight.parallelize(root, layout, seed=3, fill=True)
    replica, model = split.mesh.rank("dp"), ParallelGPT(split)
    return replica, ask(model, replica), ask(model, (replica + 1) % split.mesh.dp)


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {"expert_parallel": 2}),
        pytest.param(4, {"expert_parallel": 4}, marks=pytest.mark.full),
        pytest.param(4, {"tensor_parallel": 2, "expert_parallel": 4}, marks=pytest.mark.full),
        pytest.param(4, {"pipeline_parallel": 2, "expert_parallel": 2}, marks=pytest.mark.full),
    ],
)
def test_each_replica_completes_its_own_prompts(ranks: int, degrees: dict[str, int]) -> None:
    whole = build().double()
    initialize(whole, 3, "model.")
    found = run(_generate, ranks, degrees)
    replicas = 1 + max(replica for replica, *_ in found)
    for replica, first, second in found:
        assert first == ask(whole, replica)
        assert second == ask(whole, (replica + 1) % replicas)
