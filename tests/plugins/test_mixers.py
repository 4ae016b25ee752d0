"""The packages of mixers, with stand-ins that compute by the formulas and check how they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops import causal_conv, delta_rule, ssd
from megalight.plugins import fla, mamba_ssm
from megalight.types import PackedSequences
from tests.plugins.fakes import Fakes

LENGTHS = [3, 1, 6]


def same_as_the_reference(fn: Any, reference: Any, inputs: list[Tensor]) -> None:
    leaves = [t.requires_grad_() for t in inputs]
    out, expected = fn(*leaves), reference(*leaves)
    weight = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(y, leaves, weight) for y in (out, expected))
    for made, true in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(made, true, rtol=1e-9, atol=1e-9)


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def lengths_of(numbers: Tensor) -> list[int]:
    """From numbers of sequences ``[1, T]``."""
    assert numbers.dtype == torch.int32
    assert numbers.min() == 0  # -1 is padding
    assert numbers.shape[0] == 1
    return torch.unique_consecutive(numbers[0], return_counts=True)[1].tolist()  # type: ignore[no-any-return]


def begins(first: int) -> Tensor:
    """Positions of packed sequences, the first of which may have begun earlier."""
    positions = PackedSequences.of_lengths(LENGTHS).positions.clone()
    positions[: LENGTHS[0]] += first
    return positions


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None, z: Any = None,
    dt_bias: Any = None, initial_states: Any = None, seq_idx: Any = None, dt_softplus: bool = False,
) -> Tensor:  # fmt: skip
    """Token by token: ``[1, T, H, P]``."""
    assert z is initial_states is None
    assert dt_softplus == (dt_bias is not None)
    dt = F.softplus(dt + dt_bias) if dt_softplus else dt
    assert chunk_size & (chunk_size - 1) == 0
    outputs, start, per = [], 0, x.shape[2] // B.shape[2]
    for length in lengths_of(seq_idx):
        state = x.new_zeros(*x.shape[2:], B.shape[-1])
        for t in range(start, start + length):
            key, query = (rows[0, t].repeat_interleave(per, 0) for rows in (B, C))
            kept = (dt[0, t] * A).exp()[:, None, None] * state
            state = kept + (dt[0, t, :, None] * x[0, t])[..., None] * key[:, None]
            outputs.append((state * query[:, None]).sum(-1) + D[:, None] * x[0, t])
        start += length
    return torch.stack(outputs)[None]


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, initial_states: Any = None,
    return_final_states: bool = False, final_states_out: Any = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """``[1, channels, T]``, channels side by side."""
    assert x.stride(1) == 1
    assert x.stride(2) % 8 == x.shape[1] % 8 == 0
    assert activation in (None, "silu", "swish")
    parts = []
    for part in x.split(lengths_of(seq_idx), 2):
        padded = F.pad(part, (weight.shape[1] - 1, 0))
        parts.append(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))
    out = torch.cat(parts, 2)
    return F.silu(out) if activation else out


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """``[B, T, H, D]``, token by token."""
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[2] == v.shape[2]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
    assert cu_seqlens is None or (len(q) == 1 and cu_seqlens.dtype == torch.int64)
    rows = []
    for b in range(len(q)):
        state, outputs = v.new_zeros(*q.shape[2:], v.shape[-1]), []
        for t in range(q.shape[1]):
            state = state * 0 if t in starts else state
            state = g[b, t].to(v.dtype).exp()[:, None, None] * state
            written = beta[b, t, :, None] * (v[b, t] - (state * k[b, t][..., None]).sum(1))
            state = state + k[b, t][..., None] * written[:, None]
            outputs.append(factor * (state * q[b, t][..., None]).sum(1))
        rows.append(torch.stack(outputs))
    return torch.stack(rows), None


@pytest.mark.parametrize("first", [0, 2])
def test_scan_of_mamba_ssm(packages: Fakes, first: int) -> None:
    packages.add("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=mamba_chunk_scan_combined)
    positions = begins(first)
    steps = [doubles(10, 4).abs(), -doubles(4).abs()]
    inputs = [doubles(10, 4, 8), *steps, doubles(10, 2, 3), doubles(10, 2, 3), doubles(4)]
    own, exact = mamba_ssm.ssd, ssd.reference_ssd
    same_as_the_reference(lambda *t: own(*t, positions), lambda *t: exact(*t, positions), inputs)
    inputs = [inputs[0], doubles(10, 4), *inputs[2:], doubles(4)]
    same_as_the_reference(lambda *t: own(*t[:6], positions, t[6]), lambda *t: exact(*t[:6], positions, t[6]), inputs)
    good = ssd.EXAMPLE._replace(device="cuda")
    assert mamba_ssm.scan_why_not(good) is None
    assert "bfloat16 and float16" in str(mamba_ssm.scan_why_not(good._replace(dtype=torch.float32)))
    assert "not 20 and 128" in str(mamba_ssm.scan_why_not(good._replace(head_dim=20)))


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("width", "first"), [(8, 2), (13, 0)])  # rows lie next to each other, or apart
def test_convolution_of_causal_conv1d(packages: Fakes, silu: bool, width: int, first: int) -> None:
    packages.add("causal_conv1d", "1.5", causal_conv1d_fn=causal_conv1d_fn)
    positions = begins(first)
    same_as_the_reference(
        lambda x, w, b: mamba_ssm.causal_conv(x[:, :8], w, b, positions, silu),
        lambda x, w, b: causal_conv.reference_causal_conv(x[:, :8], w, b, positions, silu),
        [doubles(10, width), doubles(8, 4), doubles(8)],
    )
    good = causal_conv.EXAMPLE._replace(device="cuda")
    assert mamba_ssm.conv_why_not(good) is None
    for change, reason in (({"taps": 5}, "2 to 4 taps, not 5"), ({"channels": 12}, "multiple of 8 channels")):
        assert reason in str(mamba_ssm.conv_why_not(good._replace(**change)))
    packages.add("causal_conv1d", "1.1", causal_conv1d_fn=causal_conv1d_fn)
    assert "causal_conv1d >= 1.2, found 1.1" in str(mamba_ssm.conv_why_not(good))


@pytest.mark.parametrize("lengths", [LENGTHS, [5, 5]])
@pytest.mark.parametrize("groups", [2, 4])
def test_rule_of_flash_linear_attention(packages: Fakes, lengths: list[int], groups: int) -> None:
    packages.add("fla.ops.gated_delta_rule", chunk_gated_delta_rule=chunk_gated_delta_rule)
    sequences = PackedSequences.of_lengths(lengths)
    keys = F.normalize(doubles(10, groups, 3), dim=-1)
    inputs = [doubles(10, groups, 3), keys, doubles(10, 4, 2), -doubles(10, 4).abs(), doubles(10, 4).sigmoid()]
    same_as_the_reference(
        lambda *t: fla.delta_rule(*t, sequences), lambda *t: delta_rule.reference_delta_rule(*t, sequences), inputs
    )
    good = delta_rule.EXAMPLE._replace(device="cuda")
    assert fla.why_not(good) is None
    assert "at most 256 features, not 512" in str(fla.why_not(good._replace(key_dim=512)))


def test_none_serves_where_it_is_not_installed() -> None:
    for why_not, example in ((mamba_ssm.scan_why_not, ssd.EXAMPLE), (mamba_ssm.conv_why_not, causal_conv.EXAMPLE)):
        assert "which is not installed. Next: pip install" in str(why_not(example))
    assert "needs the package fla, which is not installed" in str(fla.why_not(delta_rule.EXAMPLE))
