"""A mixture of experts on a GPU: as on the CPU, and no wait of the host where everything is local."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.models.config import InitConfig
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.model import build_experts
from megalight.nn import LayerContext
from megalight.nn.aux_losses import KeptAuxLosses
from megalight.nn.init import initialize
from megalight.nn.moe import BalanceConfig, CapacityConfig, MoE, MoEConfig, RouterConfig, SharedConfig
from megalight.types import PackedSequences

pytestmark = pytest.mark.gpu

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"router": RouterConfig(top_k=2), "balance": BalanceConfig(aux_loss=0.1, z_loss=0.1)},
    "sequences": {"router": RouterConfig(top_k=4, pre_softmax=True), "balance": BalanceConfig(seq_aux_loss=0.1)},
    "sigmoid": {
        "router": RouterConfig(top_k=4, score="sigmoid", num_groups=4, group_top_k=2, expert_bias=True),
        "balance": BalanceConfig(global_aux_loss=0.1),
        "shared": SharedConfig(ffn_hidden_size=64, gate=True),
    },
    "capacity": {"capacity": CapacityConfig(factor=1.0, pad=True)},
    "limits": {"clamp": 1.0, "glu_offset": 1.0, "bias": True},
}


def build(dtype: torch.dtype, **moe: Any) -> MoE:
    config = GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_heads=2,
        vocab_size=5,
        max_sequence_length=512,
        init=InitConfig(std=0.1),
        moe=MoEConfig(num_experts=8, ffn_hidden_size=96, **moe),
    )
    made = build_experts(config)
    initialize(made, 3)
    return made.to(dtype)


def step(moe: MoE, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients, those of the losses included."""
    kept = KeptAuxLosses()
    sequences = PackedSequences.of_lengths([200, 56], hidden.device)
    hidden = hidden.detach().requires_grad_()
    out = moe(hidden, LayerContext(sequences, {}, kept))
    total = torch.stack([out.float().square().mean(), *(value.float() for value in kept.values.values())]).sum()
    return [out.detach(), *torch.autograd.grad(total, [hidden, *moe.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    """The input separates the experts' scores well, so that rounding does not change a choice.

    A clamp has no such input: values near the limit are rounded to it, and lose their gradient.
    """
    moe = build(dtype, **VARIANTS[name])
    hidden = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = step(moe.double(), hidden.double())
    moe.to(dtype)
    moe.router.running.reset()
    found = step(moe.cuda(), hidden.cuda())
    tolerance = 2e-5 if dtype == torch.float32 else 1e-1 if VARIANTS[name].get("clamp") else 3e-2
    names = ["output", "hidden", *(name for name, _ in moe.named_parameters())]
    for name, actual, wanted in zip(names, found, expected, strict=True):
        error = (actual.cpu().double() - wanted).norm() / wanted.norm()
        assert error <= tolerance, f"{name} differs by {error:.2e}"


def test_the_shared_expert_on_a_stream_of_its_own() -> None:
    moe = build(torch.float32, **VARIANTS["sigmoid"]).cuda()
    hidden = torch.randn(256, 64, device="cuda")
    expected = step(moe, hidden)
    moe.shared_expert_overlap = True
    for _ in range(20):  # memory that one stream frees too early is used again by the other
        moe.router.running.reset()
        for actual, wanted in zip(step(moe, hidden), expected, strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_host_does_not_wait(name: str) -> None:
    moe = build(torch.bfloat16, **VARIANTS[name]).cuda()
    hidden = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    sequences = PackedSequences.of_lengths([200, 56], "cuda")

    def run() -> None:
        kept = KeptAuxLosses()
        x = hidden.detach().requires_grad_()
        out = moe(x, LayerContext(sequences, {}, kept))
        torch.stack([out.float().square().mean(), *kept.values.values()]).sum().backward()

    run()  # compiles kernels and makes state
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
