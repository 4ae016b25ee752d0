"""Attention in 8 bits through TransformerEngine's module, by a stand-in that checks how it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.ops.fp8_attention import EXAMPLE, FP8Attention, FP8AttentionSpec
from megalight.plugins.transformer_engine.attention import fp8_attention_why_not as why_not
from megalight.types import PackedSequences
from tests.ops.checks import error
from tests.plugins import fakes
from tests.plugins.fakes import Fakes

SPEC = FP8AttentionSpec("cuda", torch.bfloat16, 16, scale=0.3)


class Format(Enum):
    HYBRID = "hybrid"
    E4M3 = "e4m3"


class Float8CurrentScaling:
    def __init__(self, fp8_format: Format, fp8_dpa: bool) -> None:
        self.fp8_format, self.fp8_dpa = fp8_format, fp8_dpa


class State:
    """The recipe of the innermost context."""

    recipe: ClassVar[Float8CurrentScaling | None] = None


@contextmanager
def autocast(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    assert enabled
    assert State.recipe is None
    State.recipe = recipe
    try:
        yield
    finally:
        State.recipe = None


class DotProductAttention(torch.nn.Module):
    made: ClassVar[list[tuple[Any, ...]]] = []
    seen: ClassVar[list[Format]] = []

    def __init__(
        self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int, attention_dropout: float,
        softmax_scale: float | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale = softmax_scale
        self.made.append((num_attention_heads, kv_channels, num_gqa_groups, attention_dropout, softmax_scale))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, qkv_format: str, attn_mask_type: str) -> Tensor:
        assert State.recipe is not None
        assert State.recipe.fp8_dpa
        assert qkv_format == "bshd"
        self.seen.append(State.recipe.fp8_format)
        return fakes.dense(q, k, v, attn_mask_type == "causal", self.scale, -1, -1, 0.0).flatten(2)


@pytest.fixture
def te(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes.pretend_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(DotProductAttention, "made", [])
    monkeypatch.setattr(DotProductAttention, "seen", [])
    packages = Fakes(tmp_path, monkeypatch)
    install(packages, "2.12.0")
    return packages


def install(packages: Fakes, version: str) -> None:
    packages.add("transformer_engine", version)
    packages.add("transformer_engine.pytorch", DotProductAttention=DotProductAttention, autocast=autocast)
    packages.add("transformer_engine.common")
    packages.add("transformer_engine.common.recipe", Float8CurrentScaling=Float8CurrentScaling, Format=Format)


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(12, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2)]


@pytest.mark.parametrize(("gradient", "used"), [("e5m2", Format.HYBRID), ("e4m3", Format.E4M3)])
def test_the_module_gets_whole_sequences_inside_the_recipe(te: Fakes, gradient: Any, used: Format) -> None:
    attention = FP8Attention("layer", SPEC._replace(gradient=gradient), "transformer_engine")
    q, k, v = data()
    sequences = PackedSequences.of_uniform(3, 4)
    for _ in range(2):
        out = attention(q, k, v, sequences)
    emulated = FP8Attention("layer", SPEC, "reference")(q, k, v, sequences)
    assert out.shape == q.shape
    assert error(out, emulated) < 0.1
    assert DotProductAttention.made == [(4, 16, 2, 0.0, 0.3)]
    assert DotProductAttention.seen == [used, used]
    assert State.recipe is None


def test_each_layer_has_a_module_of_its_own(te: Fakes) -> None:
    """The scale of the gradients of scores comes from earlier calls of the same layer."""
    q, k, v = data()
    for name in ("first", "second"):
        FP8Attention(name, SPEC, "transformer_engine")(q, k, v, PackedSequences.of_uniform(3, 4))
    assert len(DotProductAttention.made) == 2


def test_it_is_not_recorded(te: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = FP8Attention("layer", SPEC, "transformer_engine")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LayoutError, match="cannot be recorded"):
        attention(*data(), PackedSequences.of_uniform(3, 4))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"power": True}, "powers of two"),
        ({"dtype": torch.float32}, "serves bfloat16 and float16"),
        ({"head_dim": 256}, "up to 128, not 256"),
    ],
)
def test_what_it_lacks(te: Fakes, change: dict[str, Any], reason: str) -> None:
    assert why_not(EXAMPLE._replace(device="cuda")) is None
    assert reason in str(why_not(EXAMPLE._replace(device="cuda", **change)))


def test_older_devices_and_releases_are_named(te: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert "compute capability 10.0, not 9.x" in str(why_not(SPEC))
    install(te, "2.3.0")
    assert "transformer_engine >= 2.8" in str(why_not(SPEC))
