from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from megalight import nn as mnn
from megalight.errors import LayoutError
from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.shared_state import ParallelDropout
from megalight.parallel.styles import (
    Attributes,
    Channels,
    Column,
    Dropout,
    HeadRegion,
    Replicated,
    Row,
    SequenceRegion,
    Style,
    Vocab,
    VocabHeadStyle,
)

MESH = ParallelMesh(4, 2, tp=4)


class Heads(nn.Module):
    """A foreign module that counts heads."""

    def __init__(self, **counts: int) -> None:
        super().__init__()
        self.inner = nn.Module()
        for name, count in counts.items():
            setattr(self.inner, name, count)


def test_attributes_become_one_ranks() -> None:
    model = Heads(num_heads=8, groups=4)
    parallelize(model, ParallelizePlan({"inner": Attributes(divide=("num_heads",), per_unit={"groups": 2})}), MESH)
    assert (model.inner.num_heads, model.inner.groups) == (2, 2)


@pytest.mark.parametrize(
    ("attributes", "count", "message"),
    [
        (Attributes(divide=("num_heads",)), 6, r"inner\.num_heads is 6; it must be an integer that 4 divides"),
        (Attributes(divide=("num_hats",)), 6, r"inner\.num_hats is None"),
        (Attributes(per_unit={"num_heads": 3}), 6, r"inner has 18 heads, and tp=4 does not divide them"),
        (Attributes(per_unit={"num_heads": 3}), 8, r"inner\.num_heads consists of 3 units .*tp=4"),
    ],
)
def test_attributes_that_do_not_divide(attributes: Attributes, count: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parallelize(Heads(num_heads=count), ParallelizePlan({"inner": attributes}), MESH)


def holder(module: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"it": module})


@pytest.mark.parametrize(
    ("module", "style", "message"),
    [
        (nn.Linear(4, 4), Dropout(), "Dropout meets it, a Linear with parameters"),
        (mnn.Linear(4, [mnn.Section("a", 4, 4)]), Row(), "it has sections of output features"),
        (mnn.Linear(4, [mnn.Section("a", 4, 4)]), Column(units=4), "leave units=4 out of its rule"),
        (nn.Linear(4, 4), (Column(), Replicated()), "the style Column replaces the module, so it must stand alone"),
        (nn.Linear(4, 2), Column(gather_output=True, units=2), r"needs units \(\[2\]\) that tp=4 divides"),
        (nn.Embedding(8, 2, max_norm=1.0), Vocab(), "an embedding with max_norm cannot be split"),
        (nn.Conv1d(4, 4, 1), Row(), r"Row meets it, a Conv1d; it serves torch\.nn\.modules\.linear\.Linear"),
    ],
)
def test_styles_that_do_not_fit(module: nn.Module, style: Style | tuple[Style, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parallelize(holder(module), ParallelizePlan({"it": style}), MESH)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def with_another(module: nn.Module) -> nn.Module:
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    module.register_buffer("count", torch.ones(1))
    return module


def of_an_instance(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x
    return module


def head(layer: nn.Module) -> mnn.LMHead:
    return mnn.LMHead(mnn.RMSNorm(4), layer)


OWN: list[tuple[Callable[[], nn.Module], Style, str]] = [
    (lambda: Twice(4, 4), Column(), r"it \(Twice\) has a forward pass of its own.*rule Column replaces it"),
    (lambda: of_an_instance(nn.Linear(4, 4)), Row(), "it .*has a forward pass of its own"),
    (lambda: hooked(nn.Embedding(8, 4)), Vocab(), "it .*has hooks, which would be lost"),
    (lambda: hooked(nn.Dropout()), Dropout(), "it .*has hooks"),
    (lambda: weight_norm(nn.Linear(4, 4)), Row(), "it .*has parametrizations"),
    (lambda: with_another(nn.Linear(4, 4)), Column(), r"it \(Linear\) has count, scale, which would be lost"),
    (lambda: head(with_another(nn.Linear(4, 4))), VocabHeadStyle(), r"it\.output_layer \(Linear\) has count, scale"),
    (lambda: head(Twice(4, 4)), VocabHeadStyle(), r"it\.output_layer \(Twice\) has a forward pass of its own"),
]


@pytest.mark.parametrize(("make", "style", "message"), OWN)
def test_what_a_split_module_would_leave_out_is_refused(
    make: Callable[[], nn.Module], style: Style, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        parallelize(holder(make()), ParallelizePlan({"it": style}), MESH)
    # On one rank the module stays as it is.
    whole = holder(make())
    modules = list(whole.modules())
    specs = parallelize(whole, ParallelizePlan({"it": style}), ParallelMesh(1, 0))
    assert list(whole.modules()) == modules
    assert set(specs) == set(whole.state_dict())


def test_a_model_is_split_once() -> None:
    model = holder(nn.Linear(4, 4))
    parallelize(model, ParallelizePlan({"it": Column()}), MESH)
    with pytest.raises(LayoutError, match=r"it \(ColumnLinear\) is parallel already"):
        parallelize(model, ParallelizePlan({"it": Column()}), MESH)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_where_gradients_are_partial(sequence_parallel: bool) -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(2), "head": nn.LayerNorm(2), "row": nn.Linear(4, 2)})
    model["plain"] = nn.Linear(2, 2)
    model["drop"] = nn.Dropout(0.1)
    plan = ParallelizePlan(
        {"norm": SequenceRegion(), "head": HeadRegion(), "row": Row(), "plain": Replicated(), "drop": Dropout()}
    )
    specs = parallelize(model.eval(), plan, MESH, sequence_parallel=sequence_parallel)
    partial = {name: spec.pieces[0].partial for name, spec in specs.items()}
    region = ("tp",) if sequence_parallel else ()
    assert partial == {
        "norm.weight": region,
        "norm.bias": region,
        "head.weight": ("tp",),
        "head.bias": ("tp",),
        "row.weight": (),
        "row.bias": region,
        "plain.weight": (),
        "plain.bias": (),
    }
    assert {name for name, spec in specs.items() if spec.pieces[0].owner} == {"row.weight"}  # rank 2 of 4
    assert isinstance(model["drop"], ParallelDropout)
    assert not model["drop"].training
    assert repr(model["row"]) == "RowLinear(1 x 4 -> 2, bias=True)"


def test_channels_are_split() -> None:
    model = holder(mnn.CausalConv(8, 3))
    specs = parallelize(model, ParallelizePlan({"it": Channels()}), MESH)
    assert model["it"].weight.shape == (2, 3)
    (piece,) = specs["it.weight"].pieces
    assert (piece.shape, piece.offset, piece.size) == ((8, 3), (4, 0), (2, 3))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (mnn.CausalConv(6, 3), r"it\.weight consists of 6 units .*tp=4: tp must divide this number"),
        (nn.Conv1d(8, 8, 3, groups=8), r"it \(Conv1d\) does not state how weight is drawn"),
    ],
)
def test_channels_that_cannot_be_split(module: nn.Module, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parallelize(holder(module), ParallelizePlan({"it": Channels()}), MESH)
