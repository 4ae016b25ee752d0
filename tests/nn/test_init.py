"""Initial values: any box drawn alone equals that box of the whole; name and seed decide, nothing else."""

import pytest
import torch
from torch import nn

from megalight.nn import Linear, Section
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import TILE, ConstantInit, Normal, draw, initialize, initializers, key


@pytest.mark.parametrize(
    ("shape", "offset", "size"),
    [
        ((2 * TILE + 7, TILE + 5), (3, 2), (TILE + 9, TILE + 1)),
        ((2 * TILE + 7, TILE + 5), (TILE, TILE), (TILE, 5)),
        ((TILE + 3,), (TILE - 2,), (4,)),
        ((5, 3, 4), (2, 0, 0), (3, 3, 4)),
        ((5, 3, 4), (0, 1, 0), (5, 1, 4)),
        ((3, 5, 500, 2), (1, 1, 7, 1), (2, 3, 490, 1)),
        ((4, 3, TILE + 3), (1, 0, TILE - 1), (2, 3, 4)),
        ((4, 2, TILE), (0, 1, 5), (4, 1, 9)),
        ((), (), ()),
        ((9, 4), (8, 3), (1, 1)),
    ],
)
def test_a_box_equals_the_box_of_the_whole(shape, offset, size):
    whole = draw(Normal(0.5), "x", shape, (0,) * len(shape), shape, 3)
    part = draw(Normal(0.5), "x", shape, offset, size, 3)
    assert torch.equal(part, whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))])


def test_values_are_those_of_every_release():
    """Tiles and their seeds define all initial values: these bits must not change."""
    values = draw(Normal(1.0), "x", (3, 2), (1, 0), (1, 2), 3)
    assert values.flatten().tolist() == pytest.approx([-0.29577574133872986, -0.43007326126098633], rel=1e-6)


def test_distribution():
    values = draw(Normal(0.5), "x", (600, 700), (0, 0), (600, 700), 3)
    assert values.mean().abs() < 0.005
    assert values.std().item() == pytest.approx(0.5, rel=0.01)
    assert torch.equal(draw(ConstantInit(2.0), "x", (3,), (1,), (2,), 3), torch.full((2,), 2.0))


def test_seed_and_name_decide():
    def values(name: str, seed: int) -> torch.Tensor:
        return draw(Normal(1.0), name, (4, 4), (0, 0), (4, 4), seed)

    torch.manual_seed(0)
    first = values("a", 1)
    torch.manual_seed(1)
    assert torch.equal(first, values("a", 1))
    assert not torch.equal(first, values("b", 1))
    assert not torch.equal(first, values("a", 2))
    assert len({key(1, "a"), key(1, "a", 0), key(1, "a", 0, 0), key(11, "a")}) == 4


def test_fused_parts_are_drawn_under_their_own_names():
    fused = nn.ModuleDict({"qkv": Linear(6, [Section("q", 8, 2), Section("k", 4, 1)], bias=True)})
    plain = nn.ModuleDict({"q": Linear(6, 8, bias=True), "k": Linear(6, 4, bias=True)})
    for model in (fused, plain):
        initialize(model, 7)
    expected = canonical_tensors(plain)
    found = canonical_tensors(fused)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert found["q.bias"].tolist() == [0.0] * 8
    assert {name for name, *_ in initializers(fused)} == {"qkv.weight", "qkv.bias"}


def test_a_prefix_names_the_place_in_a_larger_model():
    whole = nn.ModuleDict({"head": nn.ModuleDict({"out": Linear(3, 5)})})
    part = nn.ModuleDict({"out": Linear(3, 5)})
    initialize(whole, 7)
    initialize(part, 7, prefix="head.")
    assert torch.equal(whole["head"]["out"].weight, part["out"].weight)
