"""Quantized weights of a unit as bytes: each rank keeps an interval, and all intervals together are the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megalight.errors import MegalightError
from megalight.ops.quantized_weight import QuantizedWeight, store, stored_of
from megalight.parallel.data_parallel.fp8_parameters import FlatQuantized
from megalight.parallel.data_parallel.layout import BucketKey, ParamInfo
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec

SHAPES = (6, 32), (2, 5, 16), (3, 48)


def stored_weights(form: str) -> list[ParamInfo]:
    draws = torch.Generator().manual_seed(4)
    infos = []
    for index, shape in enumerate(SHAPES):
        weight = nn.Parameter(torch.randn(shape, generator=draws), requires_grad=False)
        store(weight, form, 16)
        infos.append(ParamInfo(str(index), weight, ShardSpec.replicated(str(index), shape), 0))
    return infos


def quantized_of(info: ParamInfo) -> QuantizedWeight:
    found = stored_of(info.parameter)
    assert found is not None
    return found


@pytest.mark.parametrize("form", ["int8", "nf4", "nvfp4"])
def test_intervals_of_all_ranks_are_the_quantized_values(form: str) -> None:
    wanted = [quantized_of(info).values() for info in stored_weights(form)]
    size = sum(quantized_of(info).nbytes for info in stored_weights(form))
    kept = []
    for rank in range(2):
        infos = stored_weights(form)
        kind = BucketKey(torch.uint8, torch.float32, -1, mesh=ParallelMesh(2, rank), unit=0)
        flat = FlatQuantized(kind, infos, None)
        kept.append(flat.own_params)
        assert flat.own_params.numel() * 2 == flat.layout.numel >= size
        for info in infos:
            assert quantized_of(info).nbytes == 0
            with pytest.raises(MegalightError, match=rf"stored quantized \({form}\) was read while only shards"):
                quantized_of(info).values()
    flat.show(torch.cat(kept))
    for info, values in zip(infos, wanted, strict=True):
        assert torch.equal(quantized_of(info).values(), values)
    flat.vacate()
    assert all(quantized_of(info).away for info in infos)
