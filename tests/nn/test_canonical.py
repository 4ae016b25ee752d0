"""Canonical names and views."""

import torch
from torch import nn

from megalight.nn import MLP, Linear, Section
from megalight.nn.canonical import CanonicalPart, canonical_tensors, parts


def test_parts_of_a_fused_layer():
    model = nn.ModuleDict({"a": nn.ModuleDict({"qkv": Linear(3, [Section("q", 4, 2), Section("k", 2, 1)], bias=True)})})
    assert list(parts(model)) == [
        CanonicalPart("a.qkv.weight", "a.q.weight", (4, 3), 0),
        CanonicalPart("a.qkv.weight", "a.k.weight", (2, 3), 12),
        CanonicalPart("a.qkv.bias", "a.q.bias", (4,), 0),
        CanonicalPart("a.qkv.bias", "a.k.bias", (2,), 4),
    ]


class Blocks(nn.Module):
    """Three matrices in one parameter, each a canonical tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 5))

    def canonical_parts(self, path, local):
        return [(f"{path}.{index}.{local}", (4, 5)) for index in range(3)]


def test_a_module_states_its_canonical_parts():
    model = nn.ModuleDict({"blocks": Blocks()})
    assert list(parts(model)) == [
        CanonicalPart("blocks.weight", f"blocks.{i}.weight", (4, 5), 20 * i) for i in range(3)
    ]
    tensors = canonical_tensors(model)
    assert torch.equal(tensors["blocks.1.weight"], model["blocks"].weight[1])


def test_tied_parameters_appear_once():
    model = nn.ModuleDict({"first": Linear(3, 3), "second": Linear(3, 3)})
    model["second"].weight = model["first"].weight
    assert [part.name for part in parts(model)] == ["first.weight"]


def test_views_write_through():
    mlp = MLP(4, 6)
    tensors = canonical_tensors(mlp)
    assert sorted(tensors) == ["down.weight", "gate.weight", "up.weight"]
    tensors["up.weight"].fill_(2.0)
    tensors["gate.weight"].fill_(1.0)
    assert mlp.gate_up.weight[:6].unique().tolist() == [1.0]
    assert mlp.gate_up.weight[6:].unique().tolist() == [2.0]
