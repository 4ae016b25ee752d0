from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Vocab
from tests.parallel.gathering import gather_canonical
from tests.support.workers import run


def lookup(padding_idx: int | None) -> bool:
    """Odd vocabulary: the last rank has a padding row, which no piece covers and nothing touches."""
    mesh = ParallelMesh(2, dist.get_rank(), tp=2)
    torch.manual_seed(0)
    whole = nn.Embedding(7, 3, padding_idx=padding_idx, dtype=torch.float64)
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3, padding_idx=padding_idx, dtype=torch.float64)})
    model.load_state_dict({"embed.weight": whole.weight})
    specs = parallelize(model, ParallelizePlan({"embed": Vocab()}), mesh)
    assert model["embed"].weight.shape == (4, 3)
    assert sum(piece.numel for piece in specs["embed.weight"].pieces) == (12, 9)[mesh.global_rank]
    ids = torch.tensor([[0, 3, 4], [6, 2, 2]])
    out = model["embed"](ids)
    assert torch.equal(out, whole(ids))
    out.square().sum().backward()
    whole(ids).square().sum().backward()
    grads = gather_canonical({"embed.weight": model["embed"].weight.grad}, specs, mesh)
    torch.testing.assert_close(grads["embed.weight"], whole.weight.grad)
    if mesh.global_rank == 1:
        assert not model["embed"].weight[3].any()
        assert not model["embed"].weight.grad[3].any()
    for wrong in (7, -1):
        with pytest.raises(IndexError):
            model["embed"](torch.tensor([wrong]))
    return True


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding(padding_idx: int | None) -> None:
    assert all(run(lookup, 2, padding_idx))
