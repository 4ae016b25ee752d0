"""One model on one mesh; several of them in one process, and under one engine."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT
from megalight.nn.init import initialise
from megalight.parallel.data_parallel import DataParallel
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel, engine_over
from megalight.parallel.options import ParallelOptions
from tests.strategies.training import BASE, canonical
from tests.workers import run

SMALL = replace(BASE, hidden_size=16, ffn_hidden_size=24)


def _built(name: str, seed: int, **degrees: int) -> ParallelModel:
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    with torch.device("meta"):
        root = GPT(BASE if name == "model" else SMALL)
    options = ParallelOptions(sequence_parallel=mesh.tp > 1)
    return ParallelModel.build(root, mesh, options, name=name, dtype=torch.float64, seed=seed)


def _one_device(model: ParallelModel, seed: int) -> bool:
    """Whether this rank's part is that of one device's draws, under the model's own name."""
    whole = GPT(BASE if model.name == "model" else SMALL).double()
    initialise(whole, seed, model.prefix)
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
    engine = engine_over([student, teacher], [student.parameters(), teacher.parameters()], DataParallel())
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


def test_a_parameter_of_no_model_is_refused() -> None:
    model = ParallelModel.build(nn.Linear(2, 2), ParallelMesh())
    with pytest.raises(ConfigurationError, match=r"shape \(3,\) that is not part of Linear; return an optimizer over"):
        engine_over([model], [[*model.parameters(), nn.Parameter(torch.zeros(3))]], DataParallel())
    with pytest.raises(ConfigurationError, match=r"bias requires gradients, but the optimizer does not hold it\. Add"):
        engine_over([model], [[model.root.weight]], DataParallel())  # type: ignore[list-item]
