from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megalight.models.transforms import DoRA, describe, rebuild
from megalight.models.transforms.lora import merge
from megalight.nn import Linear, Section
from megalight.nn.init import initialize
from tests.models.transforms.test_lora import VARIANTS, parity
from tests.support.workers import run


@pytest.mark.parametrize("bias", [False, True])
def test_the_formula_of_the_paper(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": nn.ModuleDict({"qkv": Linear(6, [Section(n, 4, 2) for n in "qkv"], bias=bias)})})
    model = model.double()
    dora = DoRA(rank=2, targets=["q", "v"], alpha=6.0)
    dora.change(model)
    initialize(model, 1)
    layer = model["block"]["qkv"]
    for parameter in layer.parameters(recurse=False):
        nn.init.normal_(parameter)
    x = torch.randn(5, 6, dtype=torch.float64)
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    dora.with_values(SimpleNamespace(root=model))  # type: ignore[arg-type]
    torch.testing.assert_close(layer(x), plain)  # it begins as the model was
    begun = layer.adapter["default"].magnitude.detach().clone()
    dora.with_values(SimpleNamespace(root=model))  # type: ignore[arg-type]
    assert torch.equal(layer.adapter["default"].magnitude, begun)  # once
    for parameter in layer.adapter["default"].parameters():
        nn.init.normal_(parameter)

    magnitude = layer.adapter["default"].magnitude.detach().clone().requires_grad_()
    up = layer.adapter["default"].B.detach().clone().requires_grad_()
    rows = []
    for index, name in enumerate("qkv"):
        weight = layer.weight[4 * index : 4 * index + 4]
        if name != "k":
            pair = 0 if name == "q" else 1
            new = weight + 3.0 * up[4 * pair : 4 * pair + 4] @ layer.adapter["default"].A[2 * pair : 2 * pair + 2]
            length = new.detach().norm(dim=1, keepdim=True)
            weight = magnitude[4 * pair : 4 * pair + 4, None] * new / length
        rows.append(weight)
    expected = torch.nn.functional.linear(x, torch.cat(rows), layer.bias)
    found = layer(x)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(layer.adapter["default"].magnitude.grad, magnitude.grad)
    torch.testing.assert_close(layer.adapter["default"].B.grad, up.grad)
    merge(model)
    torch.testing.assert_close(layer(x), expected)
    assert {name for name, _ in model.named_parameters()} <= {"block.qkv.weight", "block.qkv.bias"}


def test_a_record_in_plain_values() -> None:
    dora = DoRA(rank=4, targets=["q"])
    assert rebuild(describe([dora])) == [dora]
    assert type(rebuild(describe([dora]))[0]) is DoRA


@pytest.mark.parametrize(
    ("world", "variant", "sequence_parallel"),
    [(2, "mha", True), (2, "gpt2", False), (4, "gqa_two_kv_heads", True)],
)
def test_magnitudes_are_split_with_their_layers(world: int, variant: str, sequence_parallel: bool) -> None:
    for errors in run(parity, world, VARIANTS[variant], sequence_parallel, ["layers.*"], None, DoRA):
        assert any("magnitude" in name for name in errors)
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong
