from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalight.nn import InnerAttention
from megalight.parallel.context.attention import ContextAttention
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.random import RandomStreams
from megalight.types import PackedSequences
from tests.support.workers import run


def dropped(kind: str) -> tuple[float, float, list[float]]:
    """With equal scores and values of 1, outputs are the weights' sums: their mean, spread, and the first few."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    mesh = ParallelMesh(cp, rank, cp=cp)
    RandomStreams(mesh).seed(3)
    module = ContextAttention(InnerAttention(causal=False, dropout=0.5), "it", kind, ContextGroups(mesh))
    share, _ = PackedSequences.of_lengths([64, 64]).zigzag(rank, cp)
    q, ones = torch.zeros(share.num_tokens, 16, 8), torch.ones(share.num_tokens, 16, 8)
    out = module(q, ones, ones, share)[..., 0]
    assert torch.equal(module.eval()(q, ones, ones, share), ones)
    return float(out.mean()), float(out.std()), out.flatten()[:8].tolist()


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather"])
def test_attention_weights_are_dropped_independently(kind: str) -> None:
    """64 weights of 1/64, each dropped or doubled: mean 1, variance 1/64, over 1024 outputs of each rank."""
    answers = run(dropped, 2, kind)
    for mean, spread, _ in answers:
        assert abs(mean - 1) < 0.02
        assert abs(spread - 1 / 8) < 0.02
    assert answers[0][2] != answers[1][2]
