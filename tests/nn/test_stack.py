"""What layers are called with: one context, a state each, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.inference import Cache
from megalight.nn import (
    MLP,
    Attention,
    InnerAttention,
    LayerContext,
    Linear,
    RMSNorm,
    Rotary,
    TransformerLayer,
    run_layers,
)
from megalight.nn.init import initialize
from megalight.parallel.recompute import RecomputeOptions, apply_recompute
from megalight.types import PackedSequences

SEQUENCES = PackedSequences.of_lengths([3, 5])


class Looking(nn.Module):
    """A mixer that adds what it makes of an encoder's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.look = Linear(4, 8, std=0.5)

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        assert memory is not None
        rows: Tensor = self.look(memory).mean(0)
        return hidden.sin() + rows


class Stack(nn.Module):
    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(RMSNorm(8), mixer, RMSNorm(8), MLP(8, 12)) for i, mixer in enumerate(mixers)}
        )
        initialize(self.double(), 1)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_memory_reaches_every_layer_and_gets_its_gradient(num_layers: int) -> None:
    model = Stack(Looking(), Looking(), Looking())
    torch.manual_seed(0)
    hidden, memory = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((8, 8), (6, 4)))
    found = []
    for recompute in (RecomputeOptions(), RecomputeOptions(granularity="full", num_layers=num_layers)):
        apply_recompute(model, recompute)
        out = run_layers(model.layers, hidden, LayerContext(SEQUENCES), memory=memory)
        found.append(torch.autograd.grad(out.square().sum(), [hidden, memory, *model.parameters()]))
    assert found[0][1].count_nonzero() == memory.numel()
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))


def test_every_mixer_reads_the_table_that_it_names() -> None:
    tables = {name: Rotary(4, base)(SEQUENCES.positions, torch.float64) for name, base in (("near", 10), ("far", 1e6))}
    model = Stack(*(Attention(8, 2, 2, 4, InnerAttention(), rotary=name) for name in ("near", "far", None)))
    hidden = torch.randn(8, 8, dtype=torch.float64)
    out = run_layers(model.layers, hidden, LayerContext(SEQUENCES, tables))
    for layer, names in zip(model.layers.values(), (["near"], ["far"], []), strict=True):
        hidden = layer(hidden, LayerContext(SEQUENCES, {name: tables[name] for name in names}))
    assert torch.equal(out, hidden)


def test_a_layer_that_cannot_say_what_it_keeps_is_refused() -> None:
    layers = nn.ModuleDict({"0": Stack(Attention(8, 2, 2, 4, InnerAttention())).layers["0"], "1": nn.Linear(3, 3)})
    with pytest.raises(ConfigurationError, match=r"layers\.1 \(Linear\) has no method make_state\(slots\)"):
        Cache(layers, 1, 4)
