"""Views refuse what they cannot stand for."""

from __future__ import annotations

import pytest
import torch

from megalight.checkpoint import Box, View, views_of_parameters, views_of_shards
from megalight.errors import CheckpointError
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardPiece, ShardSpec
from tests.checkpoint.layouts import Shard

SPEC = {"a": ShardSpec.replicated("a", (2, 3))}


def test_a_parameter_needs_its_own_spec() -> None:
    with pytest.raises(CheckpointError, match=r"'b' has no ShardSpec"):
        views_of_parameters([("b", torch.ones(2, 3))], SPEC, ParallelMesh())
    with pytest.raises(CheckpointError, match=r"shape \[3, 2\]"):
        views_of_parameters([("a", torch.ones(3, 2))], SPEC, ParallelMesh())
    with pytest.raises(CheckpointError, match="not contiguous"):
        views_of_parameters([("a", torch.ones(3, 2).t())], SPEC, ParallelMesh())


def test_views_are_handles() -> None:
    view = View("a", (4,), [Box((0,), torch.ones(2)), Box((3,), torch.ones(1))])
    assert repr(view) == "View('a', shape=[4], torch.float32, 3 elements here)"
    with pytest.raises(CheckpointError, match="only saved and loaded"):
        view + 1
    with pytest.raises(CheckpointError, match="several dtypes"):
        View("a", (4,), [Box((0,), torch.ones(2)), Box((2,), torch.ones(2).double())])
    with pytest.raises(CheckpointError, match="two parts at one place"):
        View("a", (4,), [Box((0,), torch.ones(2)), Box((0,), torch.ones(3))])


def test_one_name_has_one_shape() -> None:
    pieces = (ShardPiece("a", (4, 1), (0, 0), (2, 1)), ShardPiece("a", (5, 1), (2, 0), (2, 1), 2))
    with pytest.raises(CheckpointError, match="shapes"):
        views_of_parameters([("x", torch.ones(4, 1))], {"x": ShardSpec(pieces, (4, 1))}, ParallelMesh())


def test_an_interval_is_a_few_boxes_of_the_same_memory() -> None:
    spec = ShardSpec.replicated("a", (3, 4, 5))
    flat = torch.arange(60.0)[7:58]
    (view,) = views_of_shards([flat], [Shard([(spec, 0)], 7, 58)], prefix="state.").values()
    assert view.canonical == "state.a"
    assert len(view.boxes) == 5
    assert sum(box.data.numel() for box in view.boxes) == 51
    whole = torch.arange(60.0).reshape(3, 4, 5)
    for box in view.boxes:
        where = tuple(slice(o, o + s) for o, s in zip(box.offset, box.data.shape, strict=True))
        assert torch.equal(box.data, whole[where])
        assert box.data.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_padding_alone_has_no_view() -> None:
    piece = ShardPiece("a", (3, 2), (3, 0), (0, 2))
    assert views_of_parameters([("x", torch.ones(2, 2))], {"x": ShardSpec((piece,), (2, 2))}, ParallelMesh()) == {}
