"""One model on one mesh; several of them in one process, and under one engine."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from megalight.parallel import initial_values
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.run_engine import engine_over
from megalight.parallel.source import FillReport, Target
from tests.strategies.training import BASE, canonical
from tests.support.workers import run

SMALL = replace(BASE, hidden_size=16, ffn_hidden_size=24)


def _built(name: str, seed: int, **degrees: int) -> ParallelModel:
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    with torch.device("meta"):
        root = GPT(BASE if name == "model" else SMALL)
    options = Layout.on(mesh, sequence_parallel=mesh.tp > 1)
    return ParallelModel.build(root, mesh, options, name=name, dtype=torch.float64, seed=seed)


def _one_device(model: ParallelModel, seed: int) -> bool:
    """Whether this rank's part is that of one device's draws, under the model's own name."""
    whole = GPT(BASE if model.name == "model" else SMALL).double()
    initialize(whole, seed, model.prefix)
    wanted = canonical(whole, dict(whole.named_parameters()))
    pieces = [(piece, tensor) for name, tensor in model.tensors().items() for piece in model.specs[name].pieces]
    assert all(piece.name.startswith(model.prefix) for piece, _ in pieces)
    return all(
        np.array_equal(
            piece.view(tensor.detach()).numpy(),
            wanted["model." + piece.name.removeprefix(model.prefix)][piece.box],
        )
        for piece, tensor in pieces
    )


def _several() -> None:
    student, teacher = _built("model", 1, tp=2, pp=2), _built("teacher", 2, tp=4)
    assert _one_device(student, 1)
    assert _one_device(teacher, 2)
    assert list(student.layers()) == [student.mesh.rank("pp")]
    assert list(teacher.layers()) == [0, 1]
    assert (student.token_multiple, teacher.token_multiple) == (2, 4)
    engine = engine_over([student, teacher], [student.parameters(), teacher.parameters()], DataParallelOptions())
    names = {info.name.partition(".")[0] for info in engine.infos}
    assert names == {"model", "teacher"}
    engine.publish()
    engine.sync_parameters()
    assert _one_device(student, 1)
    assert _one_device(teacher, 2)


def test_models_of_different_layouts_live_side_by_side() -> None:
    run(_several, 4)


def test_a_copy_is_a_model_of_its_own() -> None:
    model = ParallelModel.build(GPT(SMALL), ParallelMesh())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.parameters()[0].zero_()
    assert twin.mesh is model.mesh
    assert twin.chunks == [twin.root]
    assert model.parameters()[0].any()


def _placed(dtype: torch.dtype = torch.bfloat16, tp: int = 1) -> ParallelModel:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    with torch.device("meta"):
        root = GPT(SMALL)
    root.layers["0"].mlp_norm.weight.requires_grad_(False)
    model = ParallelModel(root, ParallelMesh(world, rank, tp=tp), Layout())
    model.place("cpu", dtype)
    return model


def _trainable(model: ParallelModel) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_storage_is_laid_out_before_values_which_are_drawn_once() -> None:
    model = _placed()
    assert all(parameter.untyped_storage().nbytes() == 2 for parameter in model.parameters())
    assert all(parameter.isnan().all() for parameter in model.parameters()), "whoever reads them too early sees NaN"
    model.begin_from(7)
    optimizer = torch.optim.SGD(_trainable(model), lr=0.1)
    with patch.object(initial_values, "draw", wraps=initial_values.draw) as draws:
        engine = engine_over([model], [optimizer.param_groups[0]["params"]], DataParallelOptions())
    names = [piece.name for name in dict(model.root.named_parameters()) for piece in model.specs[name].pieces]
    assert sorted(call.args[1] for call in draws.call_args_list) == sorted(names), "each tensor once"
    whole = GPT(SMALL)
    initialize(whole, 7, "model.")
    drawn = dict(whole.named_parameters())
    for name, parameter in model.root.named_parameters():
        assert torch.equal(parameter, drawn[name].bfloat16()), name
    for bucket in engine.buckets:
        for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
            assert torch.equal(bucket.shard.part(slot.start, slot.stop), drawn[info.name].detach().flatten())
    assert (model.pending, model.origin) == (False, None)


def test_a_model_that_is_not_trained_gets_memory_of_its_own() -> None:
    model, expected = _placed(torch.float64), _placed(torch.float64)
    model.begin_from(7)
    model.fill()
    expected.draw(7)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Watched:
    """The tensors of a one-device model, and how many elements of which were asked for."""

    def __init__(self) -> None:
        whole = GPT(SMALL).double()
        initialize(whole, 11, "model.")
        self.values = canonical(whole, dict(whole.named_parameters()))
        self.tensors: dict[str, Any] = self.values
        self.asked: dict[str, int] = defaultdict(int)

    def fill(self, targets: Iterable[Target], *, strict: bool = True, **options: Any) -> FillReport:
        assert strict
        for target in targets:
            box = tuple(slice(a, a + n) for a, n in zip(target.offset, target.data.shape, strict=True))
            target.data.copy_(torch.as_tensor(self.values[target.name][box]))
            self.asked[target.name] += target.data.numel()
        return FillReport((), ())


def _read_into_shards(level: Any) -> tuple[dict[str, int], bool]:
    source, model = Watched(), _placed()
    model.begin_from(7, source)
    engine = engine_over([model], [_trainable(model)], DataParallelOptions(level=level))
    named = model.root.named_parameters()
    values = canonical(model.root, {name: parameter.detach().double() for name, parameter in named})
    equal = all(np.array_equal(values[n], torch.as_tensor(v).bfloat16().double()) for n, v in source.values.items())
    assert not any(bucket.shard.master.isnan().any() for bucket in engine.buckets)
    return dict(source.asked), equal


@pytest.mark.parametrize("level", ["optim", "no_shard"])
def test_a_source_is_read_once_straight_into_shards(level: str) -> None:
    found = run(_read_into_shards, 2, level)
    assert all(equal for _, equal in found)
    for name, value in Watched().values.items():
        frozen, times = name.endswith("layers.0.mlp_norm.weight"), 2 if level == "no_shard" else 1
        assert sum(asked.get(name, 0) for asked, _ in found) == value.size * (2 if frozen else times), name


def test_a_parameter_of_no_model_is_refused() -> None:
    model = ParallelModel.build(nn.Linear(2, 2), ParallelMesh())
    with pytest.raises(ConfigurationError, match=r"shape \(3,\) that is not part of Linear; return an optimizer over"):
        engine_over([model], [[*model.parameters(), nn.Parameter(torch.zeros(3))]], DataParallelOptions())
    with pytest.raises(ConfigurationError, match=r"bias requires gradients, but the optimizer does not hold it\. Add"):
        engine_over([model], [[model.root.weight]], DataParallelOptions())  # type: ignore[list-item]
