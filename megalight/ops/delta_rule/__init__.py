"""The gated delta rule (https://arxiv.org/abs/2412.06464), within packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import HALF, lazy, serve_all, triton_why_not
from megalight.ops.delta_rule import reference
from megalight.registry import Backend, BackendRegistry, remembered
from megalight.types import PackedSequences


class DeltaRuleSpec(NamedTuple):
    """A request to the rule.

    Attributes:
        device: device type.
        dtype: dtype of ``q``, ``k`` and ``v``.
        key_dim: ``K``.
        value_dim: ``V``.
    """

    device: str
    dtype: torch.dtype
    key_dim: int
    value_dim: int


DELTA_RULE: BackendRegistry[DeltaRuleSpec, Callable[..., Tensor]] = BackendRegistry("delta_rule")
CONTINUED: BackendRegistry[DeltaRuleSpec, Callable[..., tuple[Tensor, Tensor]]] = BackendRegistry(
    "delta_rule_continued"
)
REGISTRIES: tuple[BackendRegistry[DeltaRuleSpec, Any], ...] = (DELTA_RULE, CONTINUED)
EXAMPLE = DeltaRuleSpec("cpu", torch.bfloat16, 128, 128)

WIDEST = 128
"""Most features of keys and of values whose states fit into the registers of the kernels."""


def _triton_why_not(spec: DeltaRuleSpec) -> str | None:
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if max(spec.key_dim, spec.value_dim) > WIDEST:
        return f"serves heads of at most {WIDEST} features, not {spec.key_dim} and {spec.value_dim}"
    return triton_why_not(spec.device, spec.dtype)


DELTA_RULE.register(Backend("triton", lazy("megalight.ops.delta_rule.triton", "delta_rule"), 20, _triton_why_not))
CONTINUED.register(Backend("triton", lazy("megalight.ops.delta_rule.triton", "continued"), 20, _triton_why_not))
CONTINUED.register(Backend("reference", reference.continued, 0, serve_all))
DELTA_RULE.register(Backend("reference", reference.delta_rule, 0, serve_all))


@remembered
def _choose(spec: DeltaRuleSpec, backend: str) -> Callable[..., Tensor]:
    return DELTA_RULE.select(spec, backend).fn


@remembered
def _choose_continued(spec: DeltaRuleSpec) -> Callable[..., tuple[Tensor, Tensor]]:
    return CONTINUED.select(spec).fn


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    sequences: PackedSequences,
    *,
    backend: str = "auto",
) -> Tensor:
    """``s[t] = e^decay[t] s[t - 1] + k[t] (beta[t] (v[t] - e^decay[t] s[t - 1]^T k[t]))^T`` and ``y[t] = s[t]^T q[t]``.

    Each head has its own state ``s [K, V]``, which begins at 0 in every sequence. Half dtypes are summed in float32.

    Args:
        q: ``[T, G, K]``; ``H / G`` neighboring heads share each.
        k: ``[T, G, K]``, of length 1 or less, or the state may grow without bound.
        v: ``[T, H, V]``.
        decay: ``[T, H]``, logarithms of factors, at most 0.
        beta: ``[T, H]``, how far the value of a key moves to ``v``: 0 not at all, 1 all the way.
        sequences: how the tokens divide into sequences, which are whole.
        backend: a backend's name, or ``auto``.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``.
    """
    spec = DeltaRuleSpec(v.device.type, v.dtype, k.shape[-1], v.shape[-1])
    return _choose(spec, backend)(q, k, v, decay, beta, sequences)


def delta_rule_continued(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, sequences: PackedSequences, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Continue sequences from their states ``[n, H, K, V]``; return outputs and states, as in :func:`delta_rule`."""
    # Decoding is one product per token. The kernels that take a state have no gradients.
    if torch.is_grad_enabled() or max(sequences.lengths) == 1:
        return reference.continued(q, k, v, decay, beta, sequences.lengths, states)
    spec = DeltaRuleSpec(v.device.type, v.dtype, k.shape[-1], v.shape[-1])
    return _choose_continued(spec)(q, k, v, decay, beta, sequences.lengths, states)
