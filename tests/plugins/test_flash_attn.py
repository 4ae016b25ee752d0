from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.ops.attention import EXAMPLE, reference_attention
from megalight.plugins.flash_attn import VERSION_2, VERSION_3, VERSION_4
from megalight.types import PackedSequences
from tests.plugins import fakes
from tests.plugins.fakes import Fakes

VERSIONS = (VERSION_2, VERSION_3, VERSION_4)
GOOD = EXAMPLE._replace(device="cuda")


def functions(version: Any) -> dict[str, Any]:
    """The two functions with the names and defaults that the release really has."""
    unlimited = None if version is VERSION_4 else -1
    wraps = (lambda out: (out, None)) if version is VERSION_4 else (lambda out: out)
    own = ({"dropout_p"} if version.dropout else set()) | ({version.sink} if version.sink else set())

    def window(size: tuple[int | None, int | None]) -> tuple[int, int]:
        assert all(side is unlimited or (side is not None and side >= 0) for side in size)
        return tuple(-1 if side is None else side for side in size)  # type: ignore[return-value]

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: Any = None, causal: bool = False,
        window_size: Any = (unlimited, unlimited), softcap: float = 0.0, deterministic: bool = False, **more: Any,
    ) -> Any:  # fmt: skip
        assert set(more) <= own
        rest = (causal, softmax_scale, *window(window_size), softcap, more.get("learnable_sink"))
        return wraps(fakes.dense(q, k, v, *rest))

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: Any = None, causal: bool = False, window_size: Any = (unlimited, unlimited),
        softcap: float = 0.0, deterministic: bool = False, **more: Any,
    ) -> Any:  # fmt: skip
        assert set(more) <= own
        rest = (causal, softmax_scale, *window(window_size), softcap, more.get("learnable_sink"))
        return wraps(fakes.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest))

    return {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}


@pytest.fixture(params=VERSIONS, ids=["2", "3", "4"])
def version(request: pytest.FixtureRequest, packages: Fakes) -> Any:
    packages.add(request.param.module, "2.8.3", **functions(request.param))
    return request.param


LAYOUTS = {
    "uniform": PackedSequences.of_uniform(2, 6),
    "ragged": PackedSequences.of_lengths([3, 1, 8]),
    "cached": replace(PackedSequences.of_lengths([2, 3]), keys=PackedSequences.of_lengths([5, 9])),
    "cached uniform": replace(PackedSequences.of_uniform(2, 1), keys=PackedSequences.of_uniform(2, 7)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_arguments_mean_what_the_op_means(
    version: Any, packages: Fakes, layout: str, causal: bool, window: int | None, softcap: float | None
) -> None:
    sequences = LAYOUTS[layout]
    keys = sequences.keys or sequences
    shapes = ((sequences.num_tokens, 4, 8), (keys.num_tokens, 2, 8), (keys.num_tokens, 2, 8))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    options = (sequences, causal, 0.3, window, softcap, 0.0)
    out, expected = version.attention(*tensors, *options), reference_attention(*tensors, *options)
    weight = torch.randn_like(expected)
    for made, wanted in zip(
        (out, *torch.autograd.grad(out, tensors, weight)),
        (expected, *torch.autograd.grad(expected, tensors, weight)),
        strict=True,
    ):
        torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-9)
    name = "flash_attn_func" if "uniform" in layout else "flash_attn_varlen_func"
    args, given = packages.called(name)
    assert args[0].shape == (
        (2, 6, 4, 8) if layout == "uniform" else (2, 1, 4, 8) if "uniform" in layout else shapes[0]
    )
    assert given["deterministic"] is False
    if "uniform" not in layout:
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (sequences.max_length, keys.max_length)


def test_deterministic_algorithms_are_handed_on(version: Any, packages: Fakes) -> None:
    q = torch.randn(12, 2, 8)
    torch.use_deterministic_algorithms(True)
    try:
        version.attention(q, q, q, LAYOUTS["uniform"], True, None, None, None, 0.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert packages.called("flash_attn_func")[1]["deterministic"] is True


def test_only_release_2_drops_weights(version: Any, packages: Fakes) -> None:
    spec = GOOD._replace(dropout=True)
    if version is not VERSION_2:
        assert version.why_not(spec) == "has no dropout"
        return
    assert version.why_not(spec) is None
    q = torch.randn(12, 2, 8)
    version.attention(q, q, q, LAYOUTS["uniform"], True, None, None, None, 0.25)
    assert packages.called("flash_attn_func")[1]["dropout_p"] == 0.25


@pytest.mark.parametrize("layout", ["uniform", "ragged"])
def test_only_release_4_has_sinks(version: Any, packages: Fakes, layout: str) -> None:
    spec = GOOD._replace(sink=True)
    if version is not VERSION_4:
        assert version.why_not(spec) == "has no sinks"
        return
    q, sink = torch.randn(12, 4, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    options = (LAYOUTS[layout], True, None, 2, None, 0.0, sink)
    torch.testing.assert_close(version.attention(q, q, q, *options), reference_attention(q, q, q, *options))
    # The argument is looked for where it is needed: older releases of the package have none.
    assert "takes no learnable_sink in this release" in version.why_not(spec)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "serves bfloat16 and float16"),
        ({"head_dim": 264, "value_dim": 264}, "multiple of 8 up to 256"),
        ({"value_dim": 64}, "needs equal key and value heads"),
        ({"head_dim": 20, "value_dim": 20}, "multiple of 8"),
    ],
)
def test_what_none_serves(version: Any, change: dict[str, Any], reason: str) -> None:
    assert version.why_not(GOOD) is None
    assert reason in version.why_not(GOOD._replace(**change))


def test_versions_and_symbols(packages: Fakes) -> None:
    packages.add("flash_attn", "2.5.9.post1", **functions(VERSION_2))
    assert VERSION_2.why_not(GOOD) == (
        "attention needs flash_attn >= 2.6, found 2.5.9.post1. Next: pip install --no-build-isolation "
        "'megalight[flash-attn]'"
    )
    assert "flash_attn.cute could not be imported (ModuleNotFoundError" in VERSION_4.why_not(GOOD)
    assert "needs the package flash_attn_interface, which is not installed. Next: build" in VERSION_3.why_not(GOOD)
    packages.add("flash_attn_interface", flash_attn_func=functions(VERSION_3)["flash_attn_func"])
    assert "flash_attn_interface has no flash_attn_varlen_func" in VERSION_3.why_not(GOOD)
    packages.add(
        "flash_attn.cute",
        flash_attn_func=lambda q, k, v, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0: q,
        flash_attn_varlen_func=functions(VERSION_4)["flash_attn_varlen_func"],
    )
    assert VERSION_4.why_not(GOOD) == (
        "flash_attn.cute:flash_attn_func takes no deterministic in this release. Next: pip install --pre flash-attn-4"
    )


@pytest.mark.parametrize(
    "line", ["raise OSError('libcudart.so.99: cannot open')", "raise RuntimeError('built for torch 1')"]
)
def test_a_broken_package_is_a_reason(packages: Fakes, line: str) -> None:
    packages.broken("flash_attn_interface", line)
    reason = VERSION_3.why_not(GOOD)
    assert "flash_attn_interface could not be imported" in reason
    assert line.split("'")[1] in reason


def test_what_blackwell_changes(packages: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.add("flash_attn_interface", **functions(VERSION_3))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert VERSION_3.why_not(GOOD) == "serves sm_80 to sm_90, not sm_10x"
    packages.add("flash_attn.cute", **functions(VERSION_4))
    assert VERSION_4.why_not(GOOD) is None
    assert VERSION_4.why_not(GOOD._replace(head_dim=256, value_dim=256)).startswith("serves heads up to 128")
