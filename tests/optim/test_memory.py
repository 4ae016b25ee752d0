"""Memory of optimizers of whole matrices: what each rank keeps and what a step adds, as docs/muon.md says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import megalight
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.optim import AdamConfig, MuonConfig, ShampooConfig, whole_matrices
from megalight.optim.whole_matrix_config import WholeMatrixConfig
from megalight.parallel.data_parallel.options import DataParallelOptions
from tests.strategies.test_experts import PLAIN
from tests.strategies.training import BASE, global_batch
from tests.support.workers import run


def _train(level: str, matrices: WholeMatrixConfig, config: GPTConfig = BASE) -> dict[str, Any]:
    layout = megalight.Layout(data_parallel=DataParallelOptions(level=level, overlap_param_gather=False))
    with torch.device("meta"):
        root = GPT(config)
    model = megalight.parallelize(root, layout, dtype=torch.bfloat16)
    muon = isinstance(matrices, MuonConfig)
    adam = AdamConfig(lr=1e-3, muon=matrices if muon else None, matrices=None if muon else matrices)
    optimizer: Any = adam.build(model.root.named_parameters())[0]
    training = megalight.Training(model, optimizer, GPTModule(config))
    sizes: list[int] = []
    whole = whole_matrices.MatrixExchange._whole

    def watched(self: Any, *args: Any) -> Any:
        result = whole(self, *args)
        sizes.append(sum(batch.nbytes for batch in result.values()))
        return result

    whole_matrices.MatrixExchange._whole = watched  # type: ignore[method-assign]
    training.forward_backward([global_batch(0)])
    optimizer.step()
    whole_matrices.MatrixExchange._whole = whole  # type: ignore[method-assign]
    homes = [(exchange.rank, matrix) for exchange, _ in optimizer.exchanges for matrix in exchange.matrices]
    return {
        "flat": sum(_bytes(optimizer.state.values())),
        "home": sum(tensor.nbytes for _, _, tensor in optimizer.home_tensors()),
        "shapes": [matrix.shape for rank, matrix in homes if matrix.home == rank],
        "matrices": sum(bucket.shard.numel for bucket in optimizer.buckets.values()),
        "others": sum(bucket.shard.numel for bucket in training.engine.buckets)
        - sum(bucket.shard.numel for bucket in optimizer.buckets.values()),
        "batches": sizes,
        "load": [exchange.load for exchange, _ in optimizer.exchanges],
        "copies": [
            sum(map(len, current.received)) for exchange, _ in optimizer.exchanges for current in exchange.rounds
        ],
        "rounds": [
            sum(len(names) * optimizer.flops(shape) for shape, names in current.own.items())
            for exchange, _ in optimizer.exchanges
            for current in exchange.rounds
        ],
    }


def _bytes(states: Any) -> Iterator[int]:
    for state in states:
        yield from (tensor.nbytes for tensor in state.values() if isinstance(tensor, torch.Tensor) and tensor.ndim)


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads_params"])
def test_momentum_takes_4_bytes_and_moments_8(level: str) -> None:
    found = run(_train, 2, level, MuonConfig())
    for rank in found:
        assert rank["flat"] == 4 * rank["matrices"] + 8 * rank["others"]
        assert rank["home"] == 0
    (load,) = found[0]["load"]
    assert max(load) <= 1.15 * sum(load) / 2


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
def test_ranks_do_equal_work_in_each_round(level: str) -> None:
    """Under full sharding, each half of a layer has matrices of its own shapes."""
    config = replace(BASE, num_layers=8, hidden_size=64, num_kv_heads=1, ffn_hidden_size=224)
    first, second = run(_train, 2, level, MuonConfig(gather_bytes=4 * 2 * 64 * 224), config)
    assert len(first["rounds"]) > 3
    (load,) = first["load"]
    assert load == [sum(first["rounds"]), sum(second["rounds"])]
    assert sum(map(max, first["rounds"], second["rounds"])) <= 1.1 * sum(load) / 2


def test_experts_of_a_stack_are_copied_together() -> None:
    (found,) = run(_train, 1, "optim", MuonConfig(), PLAIN)
    assert sorted(found["shapes"]).count((32, 12)) == 4  # the second products of the experts of one layer
    assert len(found["shapes"]) > 20
    assert sum(found["copies"]) <= 8


def test_state_of_whole_matrices_is_divided() -> None:
    found = run(_train, 2, "optim", ShampooConfig())
    for rank in found:
        assert rank["flat"] == 8 * rank["others"]
        assert rank["home"] == sum(4 * (2 * m * m + 2 * n * n + m * n) for m, n in rank["shapes"])
    every = sorted(shape for rank in found for shape in rank["shapes"])
    # Queries, keys, values, the projection back, gate, up and down of each layer, each once.
    assert every == sorted([(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)] * BASE.num_layers)


@pytest.mark.parametrize("gather_bytes", [1, 2**14, 2**20])
def test_batches_are_as_large_as_they_may_be(gather_bytes: int) -> None:
    for rank in run(_train, 2, "optim", MuonConfig(gather_bytes=gather_bytes)):
        # At least one matrix: the largest has 48 x 32 elements of 2 bytes.
        assert max(rank["batches"]) <= max(gather_bytes, 2 * 48 * 32)
        assert sum(rank["batches"]) == sum(2 * m * n for m, n in rank["shapes"])
    if gather_bytes == 1:
        assert max(rank["batches"]) <= 2 * 48 * 32
