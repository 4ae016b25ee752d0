"""Real packages on a GPU: skipped where they are not installed, a failure where they are and do not work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megalight import registry
from megalight.imports import has
from megalight.models.gpt import GPT, GPTBackendConfig, GPTConfig, InitConfig
from megalight.nn.init import initialize
from megalight.ops import use_backends
from megalight.ops.attention import EXAMPLE, attention, reference_attention
from megalight.types import PackedSequences
from tests.models.test_gpt_cuda import SIZES, STYLES, batch
from tests.ops.checks import check, error
from tests.support.reference_gpt import canonical_gradients

MARKS = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
"""What the packages warn of is no failure of ours."""


def need(package: str, plugin: str, register: Callable[[], None]) -> None:
    """The plugin's backends are there, also where Megalight runs from its folder without being installed."""
    if not has(package.partition(".")[0]):
        pytest.skip(f"{package} is not installed")
    if plugin not in registry.load_plugins():
        registry._loading.append(plugin)
        try:
            register()
        finally:
            registry._loading.pop()
        registry._loaded[plugin] = None


def serve(why_not: Callable[[Any], str | None], spec: Any, absent: str = "is not installed") -> None:
    """Fails with the reason, unless the package is not here."""
    reason = why_not(spec)
    if reason is not None and absent in reason:
        pytest.skip(reason)
    assert reason is None, reason


GOOD = EXAMPLE._replace(device="cuda")


def uniform(batch: int, length: int) -> PackedSequences:
    return PackedSequences.of_uniform(batch, length, "cuda")


def ragged(*lengths: int) -> PackedSequences:
    return PackedSequences.of_lengths(lengths, "cuda")


def check_attention(
    backend: str,
    sequences: PackedSequences,
    heads: tuple[int, int],
    dim: int,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sink: bool = False,
) -> None:
    """bfloat16, output and gradients, against float64: relative norm at most 8e-3, and twice that for sinks."""
    keys = sequences.keys or sequences
    shapes = ((sequences.num_tokens, heads[0]), (keys.num_tokens, heads[1]), (keys.num_tokens, heads[1]))
    options = {"causal": causal, "window": window, "softcap": softcap}
    check(
        lambda q, k, v, *s: attention(q, k, v, sequences, **options, sink=s[0] if s else None, backend=backend),
        lambda q, k, v, *s: reference_attention(q, k, v, sequences, causal, None, window, softcap, 0.0, *s),
        [
            *(torch.randn(*shape, dim, device="cuda").bfloat16() for shape in shapes),
            *([torch.randn(heads[0], device="cuda").bfloat16()] if sink else []),
        ],
        poison=False,
        sums=(3,),
    )


def check_model(style: str, names: GPTBackendConfig, **ops: str) -> None:
    """A small GPT in bfloat16: losses within 0.02 of the same weights in float32, gradients within 0.06."""
    tokens, labels = (t.flatten().cuda() for t in batch(2, 128))
    found: list[dict[str, torch.Tensor]] = []
    for backends in (GPTBackendConfig(), names):
        with torch.device("cuda"):
            model = GPT(GPTConfig(**SIZES, **STYLES[style], init=InitConfig(std=0.06), backends=backends))
        initialize(model, 5)
        model.to(torch.bfloat16)
        if backends is not names:
            model.to(torch.float32)
        use_backends(**(ops if backends is names else {}))
        try:
            losses = model(tokens, uniform(2, 128), labels).losses
            losses.sum().backward()
        finally:
            use_backends(**dict.fromkeys(ops, "auto"))
        found.append({"losses": losses.detach(), **canonical_gradients(model)})
    plain, ours = found
    for name, expected in plain.items():
        if not name.endswith("k.bias"):  # zero but for rounding
            assert error(ours[name], expected) < (0.02 if name == "losses" else 0.06), name
