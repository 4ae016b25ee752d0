"""Flex attention by its uncompiled form, which the CPU has for the forward pass alone. See also the tests on a GPU."""

from __future__ import annotations

import pytest
import torch

from megalight.errors import BackendError
from megalight.ops.attention import ATTENTION, EXAMPLE, attention, flex_attention, reference_attention
from megalight.types import PackedSequences


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths", [[7, 7], [130, 1, 61]])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
def test_equals_the_reference(lengths: list[int], causal: bool, window: int | None) -> None:
    sequences = PackedSequences.of_lengths(lengths)
    q, k, v = (torch.randn(sum(lengths), heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    found = flex_attention(q, k, v, sequences, causal, 0.7, window, 1.5, 0.0)
    wanted = reference_attention(q, k, v, sequences, causal, 0.7, window, 1.5, 0.0)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": False}, "serves attention with a soft cap only"),
        ({"square": False}, "every step would need a new one"),
        ({"sink": True}, "has no sinks"),
        ({"dropout": True}, "has no dropout"),
        ({"head_dim": 24}, "multiple of 16 up to 256 in half types, not 24"),
        ({"dtype": torch.float32}, r"half types, not 128 in torch\.float32"),
        ({}, "needs tensors on cuda, not on cpu"),
    ],
)
def test_why_not(options: dict[str, object], reason: str) -> None:
    spec = EXAMPLE._replace(**{"softcap": True, **options})  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=reason):
        ATTENTION.select(spec, "flex")


def test_soft_caps_on_the_cpu_take_the_reference() -> None:
    q = torch.randn(6, 2, 16)
    sequences = PackedSequences.of_uniform(1, 6)
    wanted = attention(q, q, q, sequences, softcap=1.0, backend="reference")
    assert torch.equal(attention(q, q, q, sequences, softcap=1.0), wanted)
