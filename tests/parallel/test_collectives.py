from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalight.errors import LayoutError
from megalight.parallel import collectives
from megalight.parallel.mesh import ParallelMesh
from tests.support.workers import run


def world() -> list[torch.Tensor]:
    """Every rank's input, known to all."""
    generator = torch.Generator().manual_seed(2)
    shape = (4, 8, 4)
    return list(torch.randn(dist.get_world_size(), *shape, generator=generator, dtype=torch.float64))


def forwards(name: str, inputs: list[torch.Tensor], dim: int) -> torch.Tensor:
    """What the region answers on this rank, from what goes in on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.stack(inputs).sum(0)
    match name:
        case "copy":
            return inputs[rank]
        case "all_reduce":
            return total
        case "split":
            return inputs[rank].chunk(size, dim)[rank]
        case "join" | "all_gather":
            return torch.cat(inputs, dim)
        case "all_to_all":
            return torch.cat([x.chunk(size, dim)[rank] for x in inputs], dim)
    return total.chunk(size, dim)[rank]


BACKWARD_OF = {
    "copy": "all_reduce",
    "all_reduce": "copy",
    "split": "all_gather",
    "join": "split",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}


def regions(dim: int) -> bool:
    """Forward and backward of each region against what they are said to be, from all ranks' tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = ParallelMesh(size, rank, tp=size).group("tp")
    inputs = world()
    for name, backward in BACKWARD_OF.items():
        x = inputs[rank].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # strides out of order
        y = getattr(collectives, name)(x, *((group,) if name in ("copy", "all_reduce") else (group, dim)))
        torch.testing.assert_close(y, forwards(name, inputs, dim))
        generator = torch.Generator().manual_seed(3)
        grads = list(torch.randn(size, *y.shape, generator=generator, dtype=torch.float64))
        y.backward(grads[rank])
        torch.testing.assert_close(x.grad, forwards(backward, grads, dim))
        torch.testing.assert_close(x.detach(), inputs[rank])  # no input is written
    return True


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_regions(size: int, dim: int) -> None:
    assert all(run(regions, size, dim))


def test_one_rank_is_the_identity() -> None:
    x = torch.randn(3, requires_grad=True)
    assert collectives.copy(x, None) is x
    assert collectives.all_reduce(x, None) is x
    for name in ("split", "join", "all_gather", "reduce_scatter", "all_to_all"):
        assert getattr(collectives, name)(x, None, 0) is x
    for name in ("start_all_reduce", "start_all_gather", "start_reduce_scatter", "start_all_to_all"):
        assert getattr(collectives, name)(x, None).wait() is x
    assert collectives.own_slice(x, None) is x


def indivisible() -> list[str]:
    group = dist.group.WORLD
    texts = []
    for call in (collectives.split, collectives.reduce_scatter, collectives.own_slice):
        with pytest.raises(LayoutError) as error:
            call(torch.zeros(3, 2), group, 0)
        texts.append(str(error.value))
    return texts


def test_token_counts_that_do_not_divide() -> None:
    for texts in run(indivisible, 2):
        for text in texts:
            assert "(3, 2) must be a multiple of the 2 ranks" in text
            assert "PackedSequences.pad_to(2)" in text
