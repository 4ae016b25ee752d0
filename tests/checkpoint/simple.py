"""A one-process checkpoint of a few tensors whose values say which step they are of."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint import View
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec

SHAPES = {"a.weight": (40, 30), "b.weight": (7, 11, 3), "c.bias": (1000,)}


def tensors(step: float) -> dict[str, Tensor]:
    return {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}


def views(values: dict[str, Tensor]) -> dict[str, View]:
    specs = {name: ShardSpec.replicated(name, tuple(value.shape)) for name, value in values.items()}
    return checkpoint.views_of_parameters(values.items(), specs, ParallelMesh())


def save(path: str | os.PathLike[str], step: int, background: checkpoint.AsyncSaver | None = None) -> None:
    """Save; with a background, begin to."""
    write = checkpoint.save if background is None else background.save
    write(
        path,
        views(tensors(step)),
        common={"global_step": step, "counts": torch.full((5,), step)},
        rank_state={"random": torch.full((9,), step)},
        files={"tokenizer.json": f"step {step}".encode()},
    )


def step_of(path: str | os.PathLike[str]) -> int:
    """The step a checkpoint is of: everything in it must agree. Verifies everything."""
    opened = checkpoint.open(path)
    step = opened.common["global_step"]
    assert opened.common["counts"].tolist() == [step] * 5
    state = opened.rank_state(0)
    assert state is not None
    assert state["random"].tolist() == [step] * 9
    assert opened.file("tokenizer.json") == f"step {step}".encode()
    values = tensors(-1)
    opened.fill(checkpoint.targets_of(views(values)))
    assert all((value == step).all() for value in values.values())
    return int(step)
