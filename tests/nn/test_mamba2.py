"""Mamba-2: equal to its recurrence token by token, within sequences alone, and continued from its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.inference import generate
from megalight.models.gpt import GPT, GPTConfig, MambaConfig
from megalight.models.gpt.config import spread
from megalight.nn import LayerContext, Mamba2
from megalight.nn.canonical import parts
from megalight.nn.init import initialize
from megalight.nn.mamba2 import Scan
from megalight.ops.ssd import ssd, ssd_continued
from megalight.types import PackedSequences
from tests.nn.continued import assert_recurrence, assert_state
from tests.ops.checks import continued_pages

MAMBA: dict[str, Any] = {"num_heads": 4, "head_dim": 4, "num_groups": 2}
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 8,
    "num_heads": 2,
    "vocab_size": 11,
    "max_sequence_length": 64,
}


def mixer(groups: int = 2, norm_groups: int = 2) -> Mamba2:
    built = Mamba2(12, 4, 3, 5, groups, norm_groups=norm_groups, std=0.5, proj_std=0.5).double()
    initialize(built, 1)
    return built


def by_loop(mixer: Mamba2, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Token by token, head by head, from the formulas alone."""
    scan, conv, outputs = mixer.scan, mixer.conv, []
    z, rows, steps = torch.split(hidden @ mixer.in_proj.weight.T, [12, conv.weight.shape[0], 4], -1)
    kernel, groups = conv.weight.shape[1], (rows.shape[1] - 12) // 10
    for gate, part, step in zip(z.split(lengths), rows.split(lengths), steps.split(lengths), strict=True):
        state = hidden.new_zeros(4, 3, 5)
        for t in range(len(part)):
            seen = sum(conv.weight[:, kernel - 1 - j] * part[t - j] for j in range(min(kernel, t + 1)))
            x, b, c = F.silu(seen + conv.bias).split([12, groups * 5, groups * 5])
            x, b, c = x.view(4, 3), b.view(groups, 5), c.view(groups, 5)
            ys = []
            new = []
            for head in range(4):
                group, dt = head // (4 // groups), torch.log1p((step[t, head] + scan.dt_bias[head]).exp())
                decay = (-scan.A_log[head].exp() * dt).exp()
                new.append(decay * state[head] + dt * torch.outer(x[head], b[group]))
                ys.append(new[-1] @ c[group] + scan.D[head] * x[head])
            state, y = torch.stack(new), torch.cat(ys) * gate[t] * torch.sigmoid(gate[t])
            normed = [u / (u.square().mean() + 1e-5).sqrt() for u in y.split(mixer.norm.group_size)]
            outputs.append(mixer.proj.weight @ (torch.cat(normed) * mixer.norm.weight))
    return torch.stack(outputs)


@pytest.mark.parametrize(("groups", "norm_groups"), [(1, 1), (2, 2), (4, 1)])
def test_equals_the_recurrence(groups: int, norm_groups: int) -> None:
    assert_recurrence(mixer(groups, norm_groups), by_loop)


def test_keeps_sequences_apart_and_continues_its_state() -> None:
    assert_state(mixer())


def test_initial_values() -> None:
    built = Mamba2(8, 4000, 1, 2, 1).float()
    initialize(built.requires_grad_(False), 3)
    steps, decays = F.softplus(built.scan.dt_bias), built.scan.A_log.exp()
    assert 1e-3 * 0.999 <= float(steps.min()) < 1.01e-3
    assert 0.099 < float(steps.max()) <= 0.1 * 1.001
    assert abs(float(steps.log().mean()) - torch.tensor([1e-3, 0.1]).log().mean()) < 0.1
    assert 1 <= float(decays.min()) < 1.1
    assert 15.9 < float(decays.max()) <= 16.001
    assert bool((built.scan.D == 1).all())
    assert float(built.conv.weight.abs().max()) <= 0.5
    assert abs(float(built.conv.weight.std()) - 0.5 / 3**0.5) < 0.01
    floored = Mamba2(8, 100, 1, 2, 1, step_floor=0.05).requires_grad_(False)
    initialize(floored, 3)
    assert abs(float(F.softplus(floored.scan.dt_bias).min()) - 0.05) < 1e-6


def test_exponents_stay_in_float32() -> None:
    built = mixer().float().to(torch.bfloat16)
    assert {p.dtype for p in built.scan.parameters()} == {torch.float32}
    assert built.in_proj.weight.dtype == torch.bfloat16
    out = built(torch.randn(6, 12).bfloat16(), LayerContext(PackedSequences.of_lengths([6])))
    assert out.dtype == torch.bfloat16
    assert {p.dtype for p in built.double().scan.parameters()} == {torch.float64}


def test_canonical_names() -> None:
    names = [part.name for part in parts(torch.nn.ModuleDict({"mamba": mixer()}))]
    sections = [f"mamba.{name}.weight" for name in ("z", "x", "B", "C", "dt")]
    convolutions = [f"mamba.conv_{name}.{kind}" for kind in ("weight", "bias") for name in ("x", "B", "C")]
    scan = [f"mamba.scan.{name}" for name in ("A_log", "dt_bias", "D")]
    assert names == [*sections, *convolutions, *scan, "mamba.norm.weight", "mamba.proj.weight"]


def test_layers_of_a_pattern() -> None:
    config = GPTConfig(**SIZES, layer_pattern="M*-M", mamba=MambaConfig(**MAMBA))
    assert [layer.names[1] for layer in GPT(config).layers.values()] == ["mamba", "attention", "mlp", "mamba"]
    assert config == GPTConfig.from_dict(config.to_dict())


@pytest.mark.parametrize(
    ("layers", "attention", "mlp", "pattern"),
    [
        (8, 0.25, 0.0, "MM*MM*MM"),
        (9, 1 / 9, 0.0, "MMMM*MMMM"),
        (10, 0.2, 0.3, "MM-*M-*MM-"),
        (4, 0.0, 0.5, "M-M-"),
    ],
)  # fmt: skip
def test_ratios(layers: int, attention: float, mlp: float, pattern: str) -> None:
    assert spread(layers, attention, mlp) == pattern
    ratios = {"attention_ratio": attention, "mlp_ratio": mlp}
    config = GPTConfig.from_dict({**SIZES, "num_layers": layers, **ratios, "mamba": MAMBA})
    assert config.layer_pattern == pattern
    assert config == GPTConfig.from_dict(config.to_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_pattern": "MX*-", "mamba": MAMBA}, r"unknown symbol 'X' for layer 1; known: M \(Mamba-2\)"),
        ({"layer_pattern": "M*-M", "mamba": MAMBA, "mtp": {"pattern": "MX"}}, "mtp.pattern has the unknown symbol 'X'"),
        ({"mtp": {"pattern": "*-"}}, "mtp.pattern is '\\*-' in a model without layer_pattern"),
        ({"layer_pattern": "M*-", "mamba": MAMBA}, "has 3 symbols and num_layers is 4"),
        ({"layer_pattern": "M*-M"}, "belong together"),
        ({"mamba": MAMBA}, "belong together"),
        ({"layer_pattern": "M*-E", "mamba": MAMBA}, "set moe exactly if there are layers E"),
        ({"layer_pattern": "M*-M", "mamba": MAMBA, "mixer_pattern": ["conv"]}, "must be one kind of attention"),
        ({"layer_pattern": "M**M", "mamba": MAMBA, "attention_ratio": 0.25}, "has 2 attention and 0 MLP layers"),
        ({"mamba": MAMBA, "attention_ratio": 0.5, "mlp_ratio": 0.5}, "leave layers for Mamba-2"),
        ({"layer_pattern": "M**M", "mamba": MAMBA, "norm": {"after": True}}, "norm.after has no meaning"),
        ({"layer_pattern": "MMMM", "mamba": {**MAMBA, "num_groups": 3}}, "not a multiple of mamba.num_groups 3"),
        ({"layer_pattern": "MMMM", "mamba": {**MAMBA, "norm_groups": 3}}, "not a multiple of mamba.norm_groups 3"),
        ({"layer_pattern": "MMMM", "mamba": {**MAMBA, "norm_eps": 0.0}}, "mamba.norm_eps is 0.0; it must be above 0"),
        ({"layer_pattern": "MMMM", "mamba": {**MAMBA, "conv_kernel": 1}}, "conv_kernel is 1"),
        ({"layer_pattern": "MMMM", "mamba": {**MAMBA, "step_range": [0.1, 0.01]}}, "step_range is"),
        ({"layer_pattern": "MMMM", "mamba": {**MAMBA, "state_size": 0}}, "state_size is 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GPTConfig.from_dict({**SIZES, **settings})


def test_a_backend_of_whole_sequences_leaves_generation_to_others() -> None:
    """Backends of plugins do not go on from a state."""
    model = GPT(GPTConfig.from_dict({**SIZES, "layer_pattern": "MMMM", "mamba": MAMBA}))
    initialize(model, seed=1)
    expected = generate(model, [[1, 2, 3]], max_new_tokens=4, temperature=0)
    for module in model.modules():
        if isinstance(module, Scan):
            module.backend = "mamba_ssm"
    assert generate(model, [[1, 2, 3]], max_new_tokens=4, temperature=0) == expected


def test_autocast_does_not_round_the_state() -> None:
    x, dt, a, d = torch.randn(40, 2, 4), torch.rand(40, 2), -torch.rand(2), torch.randn(2)
    b, c = torch.randn(2, 40, 1, 3)
    packed = PackedSequences.of_lengths([40])
    state = torch.randn(3, 2, 4, 3)

    def computed() -> list[Tensor]:
        states = state.clone()
        several = ssd_continued(x, dt, a, b, c, d, states, continued_pages("cpu", [1, 39]))
        return [ssd(x, dt, a, b, c, d, packed), several, states]

    expected = computed()
    with torch.autocast("cpu", torch.bfloat16):
        found = computed()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
