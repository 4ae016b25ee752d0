"""Targets are boxes of a rank's own memory, and a source may be read under another prefix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megalight.errors import CheckpointError
from megalight.parallel.shard import ShardPiece, ShardSpec
from megalight.parallel.source import (
    FillReport,
    FillRequest,
    RenamedSource,
    SelectedSource,
    Source,
    Target,
    TensorMetadata,
    WrappedSource,
    parameter_targets,
    shard_targets,
)
from tests.checkpoint.layouts import LAYOUTS, STATES, Layout, Model, full


@dataclass
class Info:
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Dictionary:
    """A source in memory that knows every name that ``full`` knows."""

    names: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, TensorMetadata]:
        return {name: Info(tuple(full(name).shape), "float32") for name in self.names}

    def fill(self, targets: Iterable[Target], *, strict=True, prefix="", process_group=None) -> FillReport:
        asked = list(targets)
        missing = {target.name for target in asked} - self.tensors.keys()
        known = {name for name in self.names if name.startswith(prefix)}
        unexpected = known - {target.name for target in asked}
        if strict and (missing or unexpected):
            raise CheckpointError(f"missing {missing}, unexpected {unexpected}")
        for target in asked:
            if target.name in known:
                box = tuple(slice(o, o + n) for o, n in zip(target.offset, target.data.shape, strict=True))
                assert target.shape == full(target.name).shape
                target.data.copy_(full(target.name)[box])
        return FillReport(tuple(sorted(missing)), tuple(sorted(unexpected)))


CANONICAL = tuple(piece.name for spec in Model(LAYOUTS[0], 0, filled=False).specs.values() for piece in spec.pieces)


@pytest.mark.parametrize("rank", [0, 3])
def test_parameters_and_shards_of_every_layout_are_filled(rank: int) -> None:
    layout = Layout(4, 2, "optim")
    model, expected = Model(layout, rank, filled=False), Model(layout, rank, filled=True)
    weights: Source = RenamedSource(Dictionary(tuple(f"model.{name}" for name in CANONICAL)), "", "model.")
    weights.fill(parameter_targets(model.parameters.items(), model.specs), strict=False)
    for state in STATES:
        states = Dictionary(tuple(f"optimizer.{state}.{name}" for name in CANONICAL))
        targets = shard_targets(model.states[state], model.shards)
        RenamedSource(states, "", f"optimizer.{state}.").fill(targets, strict=False)
    assert model.differs(expected) == []  # padding is left alone


def test_another_prefix_is_another_model() -> None:
    stored = Dictionary(("model.temperature", "model.layers.0.norm.weight", "optimizer.exp_avg.temperature"))
    teacher = RenamedSource(stored, "teacher.", "model.")
    assert set(teacher.tensors) == {"teacher.temperature", "teacher.layers.0.norm.weight"}
    value, norm = torch.zeros(()), torch.zeros(6)
    both = [Target("teacher.temperature", (), (), value), Target("teacher.layers.0.norm.weight", (6,), (0,), norm)]
    assert teacher.fill(both) == FillReport((), ())
    assert torch.equal(value, full("model.temperature"))
    assert torch.equal(norm, full("model.layers.0.norm.weight"))
    with pytest.raises(CheckpointError, match=r"unexpected \{'model\.layers\.0\.norm\.weight'\}"):
        teacher.fill(both[:1], prefix="teacher.")
    more = Target("teacher.new", (), (), torch.zeros(()))
    assert teacher.fill([both[0], more], strict=False) == FillReport(
        ("teacher.new",), ("teacher.layers.0.norm.weight",)
    )


def test_memory_that_would_be_copied_is_refused() -> None:
    spec = ShardSpec((ShardPiece("x", (2, 3), (0, 0), (2, 3)),), (2, 3))
    tensor: Tensor = torch.zeros(3, 2).t()
    with pytest.raises(RuntimeError, match="view"):
        list(parameter_targets([("x", tensor)], {"x": spec}))


class Doubled(WrappedSource):
    """Asks leniently, and doubles what was read."""

    def before(self, request: FillRequest) -> FillRequest:
        return replace(request, strict=False)

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        for target in request.targets:
            target.data.mul_(2)
        return FillReport(filled.missing, ("strict",) if request.strict and not passed.strict else ())


def test_a_wrapped_source_is_asked_and_heard_through_its_hooks() -> None:
    stored = Dictionary(("model.temperature", "model.layers.0.norm.weight"))
    norm = torch.ones(6)
    target = Target("model.layers.0.norm.weight", (6,), (0,), norm)
    assert Doubled(stored).fill(iter([target])) == FillReport((), ("strict",))  # targets may come one by one
    assert torch.equal(norm, 2 * full("model.layers.0.norm.weight"))
    assert WrappedSource(Doubled(stored)).fill([target], strict=False) == FillReport((), ())
    with pytest.raises(CheckpointError, match=r"unexpected \{'model\.temperature'\}"):
        WrappedSource(stored).fill([target], prefix="model.")
    assert WrappedSource(stored).fill([target], prefix="model.layers") == FillReport((), ())


def test_chosen_tensors_are_named_where_the_source_lacks_them() -> None:
    head = SelectedSource(Dictionary(("model.temperature",)), {"t": "model.temperature", "norm": "model.norm.weight"})
    value = torch.zeros(())
    targets = [Target("t", (), (), value)]
    with pytest.raises(CheckpointError, match=r"the weights lack model\.norm\.weight"):
        head.fill(targets)
    assert head.fill(targets, strict=False) == FillReport(("norm",), ())
    assert torch.equal(value, full("model.temperature"))
