"""Deferred weight gradients of a model that is split over ranks."""

from __future__ import annotations

import copy

import pytest
import torch.distributed as dist

from megalight.models.gpt import GPTConfig
from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.ops.linear import WeightGradients, deferring
from megalight.parallel.apply import parallelize
from megalight.parallel.data_parallel import DataParallelEngine, ParamInfo
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions, apply_recompute
from tests.parallel.test_apply import BASE, batch, jitter, twin
from tests.support.workers import run

KINDS = [
    RecomputeOptions(),
    RecomputeOptions(granularity="full", num_layers=2),
    RecomputeOptions(granularity="selective", modules=("attention_norm", "mlp_norm", "mlp.act")),
]


def split(sequence_parallel: bool) -> list[str]:
    """What deferring changes, to the bit, through the engine; each micro-batch's weight gradients come one later."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), tp=dist.get_world_size())
    attention = AttentionConfig(qk_norm=True, qkv_bias=True, proj_bias=True)
    model = twin(GPTConfig(**BASE, num_kv_heads=2, attention=attention, mlp_bias=True))
    jitter(model)
    specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=sequence_parallel)
    tokens, labels, _, sequences = batch(101, [7, 1, 5, 8], mesh.tp)

    def gradients(recompute: RecomputeOptions, deferred: bool) -> dict[str, object]:
        copied = copy.deepcopy(model)
        apply_recompute(copied, recompute)
        infos = [ParamInfo(name, p, specs[name], 0) for name, p in copied.named_parameters()]
        engine = DataParallelEngine(infos, mesh)
        engine.zero_grad()
        queues: list[WeightGradients] = []
        with engine.micro_batches(3):
            for index in range(3):
                loss = copied((tokens + index) % 101, sequences, labels).losses.sum()
                queue = WeightGradients()
                if deferred:
                    with deferring(queue):
                        loss.backward()
                    assert len(queue) == 8  # qkv, proj, gate and up, down in two layers
                else:
                    loss.backward()
                if queues:
                    queues.pop().run()
                queues.append(queue)
            queues.pop().run()
        engine.finish_grad_sync()
        return {name: p.main_grad for name, p in copied.named_parameters()}

    expected = gradients(RecomputeOptions(), deferred=False)
    return [
        f"{recompute.granularity}: {name}"
        for recompute in KINDS
        for name, gradient in gradients(recompute, deferred=True).items()
        if not gradient.equal(expected[name])
    ]


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True], ids=["tp", "tp+sp"])
def test_equal_to_immediate_ones_to_the_bit(sequence_parallel: bool) -> None:
    assert run(split, 2, sequence_parallel) == [[], []]
