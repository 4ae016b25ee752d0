"""Variants of experts against loops over tokens: activations, limits, biases, weighted inputs, shared networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.config import InitConfig
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.config import GPTBackendConfig
from megalight.models.gpt.model import build_experts
from megalight.nn import Activation
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize
from megalight.nn.moe import Experts, MoE, MoEConfig, RouterConfig, SharedConfig
from megalight.parallel.recompute import RecomputeOptions, check_recompute
from tests.nn.moe.loops import WIDTH, context


def build(activation: str, backend: str = "auto", **moe: Any) -> MoE:
    config = GPTConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_heads=2,
        vocab_size=5,
        max_sequence_length=32,
        activation=activation,
        init=InitConfig(std=0.7),
        backends=GPTBackendConfig(experts=backend),
        moe=MoEConfig(num_experts=4, ffn_hidden_size=6, **moe),
    )
    made = build_experts(config).double()
    initialize(made, 11)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return made


FUNCTIONS = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
}


def expert(tensors: dict[str, Tensor], index: int, token: Tensor, weight: Tensor, activation: str, moe: Any) -> Tensor:
    """One token through one expert, from the formulas."""

    def project(name: str, x: Tensor) -> Tensor:
        y = tensors[f"experts.{index}.{name}.weight"] @ x
        return y + tensors[f"experts.{index}.{name}.bias"] if moe.get("bias") else y

    x = token * weight if moe.get("weigh_input") else token
    up, clamp = project("up", x), moe.get("clamp")
    if activation.endswith("glu"):
        gate = project("gate", x)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        inner = FUNCTIONS[activation](gate) * (up + moe.get("glu_offset", 0.0))
    else:
        inner = FUNCTIONS[activation](up)
    out = project("down", inner)
    return out if moe.get("weigh_input") else out * weight


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("swiglu", {}),
    ("geglu", {}),
    ("squared_relu", {}),
    ("quick_geglu", {"glu_offset": 1.0, "clamp": 0.6, "bias": True}),
    ("gelu", {"bias": True}),
    ("swiglu", {"weigh_input": True, "bias": True, "router": RouterConfig(top_k=1, score="sigmoid")}),
    ("swiglu", {"shared": SharedConfig(ffn_hidden_size=10)}),
    ("squared_relu", {"shared": SharedConfig(ffn_hidden_size=5, gate=True)}),
]


@pytest.mark.parametrize("backend", ["auto", "loop"])
@pytest.mark.parametrize(("activation", "moe"), VARIANTS)
def test_equal_to_a_loop(activation: str, moe: dict[str, Any], backend: str) -> None:
    made = build(activation, backend, **moe)
    hidden = torch.randn(13, WIDTH, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(13, WIDTH, dtype=torch.float64)
    out = made(hidden, context(13))
    gradients = torch.autograd.grad((out * cotangent).sum(), [hidden, *made.parameters()])
    # the loop reads canonical tensors, which are copies here, so that they get gradients of their own
    tensors = {name: value.clone().requires_grad_() for name, value in canonical_tensors(made).items()}
    router = made.router
    probs, experts = torch.func.functional_call(router, {"weight": tensors["router.weight"]}, (hidden, context(13)))
    rows = []
    for place, token in enumerate(hidden):
        pairs = zip(experts[place].tolist(), probs[place], strict=True)
        total = torch.stack([expert(tensors, e, token, weight, activation, moe) for e, weight in pairs]).sum(0)
        if "shared" in moe:
            shared = tensors["shared.up.weight"] @ token
            if activation.endswith("glu"):
                shared = FUNCTIONS[activation](tensors["shared.gate.weight"] @ token) * shared
            else:
                shared = FUNCTIONS[activation](shared)
            shared = tensors["shared.down.weight"] @ shared
            if moe["shared"].gate:
                shared = shared * torch.sigmoid(tensors["shared_gate.weight"] @ token)
            total = total + shared
        rows.append(total)
    expected = torch.stack(rows)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    found = torch.autograd.grad((expected * cotangent).sum(), [hidden, *tensors.values()], allow_unused=True)
    torch.testing.assert_close(gradients[0], found[0], rtol=1e-9, atol=1e-11)
    for parameter, gradient in zip(made.parameters(), gradients[1:], strict=True):
        parameter.grad = gradient
    wanted = dict(zip(tensors, found[1:], strict=True))
    for parameter in made.parameters():
        assert parameter.grad is not None
        parameter.data.copy_(parameter.grad)
    for name, value in canonical_tensors(made).items():
        gradient = torch.zeros_like(value) if wanted[name] is None else wanted[name]
        torch.testing.assert_close(value, gradient, rtol=1e-9, atol=1e-11)


def test_limits_need_a_gated_activation() -> None:
    with pytest.raises(ConfigurationError, match="belong to gated activations, and 'gelu' is none"):
        Activation("gelu", clamp=1.0)
    with pytest.raises(ConfigurationError, match=r"moe.glu_offset and moe.clamp belong to gated activations"):
        build("squared_relu", glu_offset=1.0)


def kept(experts: Experts, dtype: torch.dtype) -> tuple[int, Tensor, list[Tensor]]:
    """Bytes that the activation keeps for the backward pass; its output and gradients."""
    draws = torch.Generator().manual_seed(1)
    # values beyond what e4m3 holds, too
    x = (torch.randn(40, 12, generator=draws) * torch.logspace(-3, 3, 40)[:, None]).to(dtype).requires_grad_()
    weights = torch.rand(40, generator=draws).requires_grad_()
    storages: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = experts.act(x, weights=weights)
    bytes_kept = sum(storages.values())
    return bytes_kept, y.detach(), list(torch.autograd.grad(y.sum(), (x, weights)))


@pytest.mark.parametrize(("activation", "moe"), [("swiglu", {}), ("quick_geglu", {"glu_offset": 1.0, "clamp": 7.0})])
def test_inputs_of_activations_are_kept_in_8_bits(activation: str, moe: dict[str, Any]) -> None:
    plain, small = (build(activation, fp8_input_store=stored, **moe).experts for stored in (False, True))
    _, expected, _ = kept(plain, torch.bfloat16)
    used, found, gradients = kept(small, torch.bfloat16)
    assert used == 40 * 12 + 40 * 4  # quantized values and weights
    assert torch.equal(found, expected)
    # gradients are those at the rounded input
    act, draws = plain.act, torch.Generator().manual_seed(1)
    x = (torch.randn(40, 12, generator=draws) * torch.logspace(-3, 3, 40)[:, None]).bfloat16().clamp(-448, 448)
    x, weights = x.to(torch.float8_e4m3fn).bfloat16().requires_grad_(), torch.rand(40, generator=draws).requires_grad_()
    exact = torch.autograd.grad(act(x, weights=weights).sum(), (x, weights))
    assert all(torch.equal(one, other) for one, other in zip(gradients, exact, strict=True))


def test_what_cannot_keep_its_input_in_8_bits_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fp8_input_store=true with activation='geglu'; it is made for swiglu"):
        build("geglu", fp8_input_store=True)
    config = GPTConfig(
        num_layers=1,
        hidden_size=8,
        num_heads=2,
        vocab_size=5,
        max_sequence_length=8,
        moe=MoEConfig(num_experts=2, fp8_input_store=True),
    )
    with pytest.raises(ConfigurationError, match="would save nothing: it keeps its input in 8 bits"):
        check_recompute(GPT(config), RecomputeOptions(granularity="selective", modules=("mlp.experts.act",)))
