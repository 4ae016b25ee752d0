"""Gated DeltaNet: equal to its recurrence token by token and to Qwen3-Next, and continued from its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT, DeltaNetConfig, GPTConfig
from megalight.models.gpt.flops import num_parameters
from megalight.nn import GatedDeltaNet, LayerContext
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize
from megalight.ops.delta_rule import delta_rule, delta_rule_continued
from megalight.types import PackedSequences
from tests.nn.continued import assert_recurrence, assert_state
from tests.ops.checks import continued_pages
from tests.support.canonical import load_canonical
from tests.support.reference_gpt import relative_error

DELTA: dict[str, Any] = {"num_heads": 4, "num_key_heads": 2, "head_dim": 3, "key_dim": 5}
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 12,
    "num_heads": 2,
    "vocab_size": 11,
    "max_sequence_length": 64,
}


def mixer(groups: int = 2) -> GatedDeltaNet:
    built = GatedDeltaNet(12, 4, groups, 3, 5, std=0.5, proj_std=0.5).double()
    initialize(built, 1)
    return built


def by_loop(mixer: GatedDeltaNet, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Token by token, head by head, from the formulas alone."""
    rule, conv, outputs = mixer.rule, mixer.conv, []
    z, rows, a, b = torch.split(hidden @ mixer.in_proj.weight.T, [12, conv.weight.shape[0], 4, 4], -1)
    kernel, groups = conv.weight.shape[1], (rows.shape[1] - 12) // 10
    for gate, part, step, rate in zip(*(each.split(lengths) for each in (z, rows, a, b)), strict=True):
        state = [hidden.new_zeros(3, 5) for _ in range(4)]
        padded = F.pad(part, (0, 0, kernel - 1, 0))
        for t in range(len(part)):
            mixed = F.silu((padded[t : t + kernel].T * conv.weight).sum(-1))
            v, q, k = mixed.split([12, 5 * groups, 5 * groups])
            v, q, k = v.view(4, 3), q.view(-1, 5), k.view(-1, 5)
            ys = []
            for head in range(4):
                key = k[head * groups // 4] / (k[head * groups // 4].square().sum() + 1e-6).sqrt()
                query = q[head * groups // 4] / (q[head * groups // 4].square().sum() + 1e-6).sqrt() / 5**0.5
                kept = state[head] * (-rule.A_log[head].exp() * F.softplus(step[t, head] + rule.dt_bias[head])).exp()
                state[head] = kept + torch.outer(torch.sigmoid(rate[t, head]) * (v[head] - kept @ key), key)
                y = state[head] @ query
                ys.append(y / (y.square().mean() + 1e-6).sqrt() * mixer.norm.weight)
            outputs.append(mixer.proj.weight @ (torch.cat(ys) * gate[t] * torch.sigmoid(gate[t])))
    return torch.stack(outputs)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_the_recurrence(groups: int) -> None:
    assert_recurrence(mixer(groups), by_loop)


def test_keeps_sequences_apart_and_continues_its_state() -> None:
    assert_state(mixer())


def test_half_dtypes() -> None:
    """Exponents and sums stay in float32."""
    built = mixer().float()
    hidden, context = torch.randn(40, 12).bfloat16(), LayerContext(PackedSequences.of_lengths([40]))
    expected = built(hidden.float(), context)
    built = built.to(torch.bfloat16)
    assert {p.dtype for p in built.rule.parameters()} == {torch.float32}
    found = built(hidden, context)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_autocast_does_not_round_the_state() -> None:
    rows = torch.randn(3, 40, 2, 4), torch.rand(2, 40, 2)
    (q, k, v), (falls, beta) = (F.normalize(rows[0], dim=-1), rows[1])
    packed, state = PackedSequences.of_lengths([40]), torch.randn(3, 2, 4, 4)

    def computed() -> list[Tensor]:
        states = state.clone()
        y = delta_rule_continued(q, k, v, -falls, beta, states, continued_pages("cpu", [1, 39]))
        return [delta_rule(q, k, v, -falls, beta, packed), y, states]

    expected = computed()
    with torch.autocast("cpu", torch.bfloat16):
        found = computed()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_layers_of_a_pattern() -> None:
    config = GPTConfig(**SIZES, layer_pattern="G*-G", delta=DeltaNetConfig(**DELTA))
    model = GPT(config)
    assert [layer.names[1] for layer in model.layers.values()] == ["delta", "attention", "mlp", "delta"]
    assert config == GPTConfig.from_dict(config.to_dict())
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_pattern": "G*-G"}, "setting delta belong together"),
        ({"delta": DELTA}, "setting delta belong together"),
        (
            {"layer_pattern": "GGGG", "delta": {**DELTA, "num_key_heads": 3}},
            "not a multiple",
        ),
        ({"layer_pattern": "GGGG", "delta": {**DELTA, "key_dim": 0}}, "key_dim is 0"),
        ({"layer_pattern": "GGGG", "delta": {**DELTA, "conv_kernel": 1}}, "conv_kernel is 1"),
        ({"layer_pattern": "GGGG", "delta": {**DELTA, "step_range": [0.1, 0.01]}}, "step_range is"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GPTConfig.from_dict({**SIZES, **settings})


def _canonical(files: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of Qwen3-Next with 2 key heads and 4 value heads, whose projections go key head by key head."""
    found = {
        "embed.word.weight": files["model.embed_tokens.weight"],
        "head.norm.weight": files["model.norm.weight"],
        "head.output_layer.weight": files["lm_head.weight"],
    }
    for layer, mixed in enumerate(("delta", "attention")):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        found[f"{ours}.{mixed}_norm.weight"] = files[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.mlp_norm.weight"] = files[f"{theirs}.post_attention_layernorm.weight"]
        for name in ("gate", "up", "down"):
            found[f"{ours}.mlp.{name}.weight"] = files[f"{theirs}.mlp.{name}_proj.weight"]
    delta, theirs = "layers.0.delta", "model.layers.0.linear_attn"
    qkvz = files[f"{theirs}.in_proj_qkvz.weight"].unflatten(0, (2, -1)).split([5, 5, 6, 6], 1)
    ba = files[f"{theirs}.in_proj_ba.weight"].unflatten(0, (2, -1)).split([2, 2], 1)
    for name, rows in zip("qkvzba", (*qkvz, *ba), strict=True):
        found[f"{delta}.{name}.weight"] = rows.flatten(0, 1)
    for name, rows in zip("qkv", files[f"{theirs}.conv1d.weight"][:, 0].split([10, 10, 12]), strict=True):
        found[f"{delta}.conv_{name}.weight"] = rows
    found[f"{delta}.norm.weight"] = files[f"{theirs}.norm.weight"]
    found[f"{delta}.proj.weight"] = files[f"{theirs}.out_proj.weight"]
    for name in ("A_log", "dt_bias"):
        found[f"{delta}.rule.{name}"] = files[f"{theirs}.{name}"]
    attention, theirs = "layers.1.attention", "model.layers.1.self_attn"
    queries = files[f"{theirs}.q_proj.weight"].unflatten(0, (2, -1)).chunk(2, 1)
    for name, rows in zip(("q", "gate"), queries, strict=True):
        found[f"{attention}.{name}.weight"] = rows.flatten(0, 1)
    for name, module in {"k": "k_proj", "v": "v_proj", "proj": "o_proj"}.items():
        found[f"{attention}.{name}.weight"] = files[f"{theirs}.{module}.weight"]
    for name in ("q_norm", "k_norm"):
        found[f"{attention}.{name}.weight"] = files[f"{theirs}.{name}.weight"]
    return found


def test_equals_qwen3_next() -> None:
    """Logits of a whole model: Gated DeltaNet, then gated attention with norms around zero and partial rotation."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    theirs = transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            vocab_size=53,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            linear_key_head_dim=5,
            linear_value_head_dim=3,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            mlp_only_layers=[0, 1],
            max_position_embeddings=64,
            layer_types=["linear_attention", "full_attention"],
            attn_implementation="eager",
            initializer_range=0.3,
        )
    ).double()
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
    config = GPTConfig.from_dict(
        {
            "num_layers": 2,
            "hidden_size": 12,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 8,
            "ffn_hidden_size": 20,
            "vocab_size": 53,
            "max_sequence_length": 64,
            "delta": DELTA,
            "mixer_pattern": ["gated_delta_net", "attention"],
            "norm": {"eps": 1e-6, "around_zero": True},
            "position": {"fraction": 0.25},
            "attention": {"qk_norm": True, "output_gate": True},
        }
    )
    ours = GPT(config).double()
    load_canonical(ours, _canonical(dict(theirs.state_dict())))
    assert canonical_tensors(ours).keys() == _canonical(dict(theirs.state_dict())).keys()
    tokens = torch.randint(0, 53, (2, 37))
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = ours(tokens.flatten(), PackedSequences.of_uniform(2, 37)).logits
    assert relative_error(found.view_as(expected), expected) < 2e-6
