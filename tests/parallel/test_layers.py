"""Layers are found by global index, in whatever holds them."""

import pytest
from torch import nn

from megalight.errors import ConfigurationError
from megalight.parallel.layers import check_own_forwards, layers_of


def model(layers: object) -> nn.Module:
    module = nn.Module()
    module.layers = layers
    return module


def test_a_part_keeps_the_global_indices() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert layers_of(model(nn.ModuleDict({"3": first, "10": second}))) == {3: first, 10: second}
    assert layers_of(model(nn.ModuleList([first, second]))) == {0: first, 1: second}
    assert layers_of(model(nn.ModuleList([first, first]))) == {0: first, 1: first}, "a layer may be used twice"


@pytest.mark.parametrize(
    ("without", "found"),
    [
        (nn.Linear(2, 2), "Linear has none"),
        (model(3), "Module holds int there"),
        (model(nn.ModuleDict({"first": nn.Linear(2, 2)})), "Module holds ModuleDict there"),
    ],
)
def test_who_needs_layers_is_named(without: nn.Module, found: str) -> None:
    assert layers_of(without) == {}
    with pytest.raises(ConfigurationError, match=f"(?s)recompute needs .*{found}.*do without recompute"):
        layers_of(without, "recompute")


def test_a_forward_that_somebody_has_set_is_not_hidden() -> None:
    modules = [("first", nn.Identity()), ("second", nn.Identity())]
    check_own_forwards(modules, "a graph")
    modules[1][1].forward = lambda x: x
    with pytest.raises(ConfigurationError, match=r"second \(Identity\) has a forward .* a graph would hide"):
        check_own_forwards(modules, "a graph")
