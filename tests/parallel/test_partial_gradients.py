"""Split layers and the data-parallel engine together: partial gradients, owners and the global norm."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from megalight.models.gpt import GPTConfig
from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.parallel.apply import parallelize
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.mesh import ParallelMesh
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import BASE, batch, canonical, jitter, twin
from tests.support.workers import run


def step(tp: int, sequence_parallel: bool, tied: bool) -> dict[str, float]:
    """One optimizer step of SGD on every layout moves the canonical weights alike."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), tp=tp)
    attention = AttentionConfig(qk_norm=True, qkv_bias=True, proj_bias=True)
    whole = twin(GPTConfig(**BASE, num_kv_heads=2, tie_embeddings=tied, attention=attention))
    jitter(whole)
    model = copy.deepcopy(whole)
    specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=sequence_parallel)
    infos = [ParamInfo(name, p, specs[name], 0) for name, p in model.named_parameters()]
    engine = DataParallelEngine(infos, mesh, DataParallelOptions(bucket_size=3000))
    optimizer = torch.optim.SGD([shard.master for shard in engine.shards], lr=0.1)
    expected = torch.optim.SGD(whole.parameters(), lr=0.1)
    tokens, labels, _, sequences = batch(101, [7, 1, 5, 8], tp)
    engine.zero_grad()
    for replica in range(mesh.dp):
        whole((tokens + replica) % 101, sequences, labels).losses.sum().backward()
    with engine.micro_batches(1):
        model((tokens + mesh.rank("dp")) % 101, sequences, labels).losses.sum().backward()
    engine.finish_grad_sync()
    norm = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
    errors = {"norm": relative_error(engine.grad_norm(), norm)}
    optimizer.step()
    engine.publish()
    engine.sync_parameters()
    expected.step()
    values = gather_canonical(dict(model.named_parameters()), specs, mesh, sum_partial=False)
    wanted = canonical(whole, dict(whole.named_parameters()))
    return errors | {name: relative_error(values[name], wanted[name]) for name in wanted}


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "tied"),
    [(4, True, True), (4, False, False), (2, True, False), pytest.param(2, False, True, marks=pytest.mark.full)],
)
def test_one_step_equals_one_device(tp: int, sequence_parallel: bool, tied: bool) -> None:
    for errors in run(step, 4, tp, sequence_parallel, tied):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong
