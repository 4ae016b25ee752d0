"""The choice of experts by logits, and the statistics that balance losses need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.router import reference
from megalight.ops.router.reference import SCORES, Routes, Rule, Statistics
from megalight.registry import Backend, BackendRegistry, remembered

__all__ = [
    "REGISTRIES",
    "ROUTE",
    "SCORES",
    "STATISTICS",
    "RouterSpec",
    "Routes",
    "Rule",
    "Statistics",
    "route",
    "statistics",
]


class RouterSpec(NamedTuple):
    """A request to a router: device type, dtype of the logits, number of experts, number of groups of experts."""

    device: str
    dtype: torch.dtype
    num_experts: int
    num_groups: int


ROUTE: BackendRegistry[RouterSpec, Callable[[Tensor, Rule, Tensor | None], Routes]] = BackendRegistry("route")
STATISTICS: BackendRegistry[RouterSpec, Callable[..., Statistics]] = BackendRegistry("router_statistics")
REGISTRIES: tuple[BackendRegistry[RouterSpec, Any], ...] = (ROUTE, STATISTICS)
MOST_EXPERTS = 1024
EXAMPLE = RouterSpec("cpu", torch.float32, 128, 1)


def _triton_why_not(spec: RouterSpec) -> str | None:
    if spec.num_experts > MOST_EXPERTS:
        return f"serves at most {MOST_EXPERTS} experts, not {spec.num_experts}"
    # The kernel views a row of experts as groups, and its tiles have powers of two as sizes.
    if spec.num_groups > 1 and any(n & (n - 1) for n in (spec.num_experts, spec.num_groups)):
        return f"needs powers of two to choose groups, not {spec.num_experts} experts in {spec.num_groups} groups"
    return triton_why_not(spec.device, spec.dtype)


_TRITON = "megalight.ops.router.triton"
ROUTE.register(Backend("triton", lazy(_TRITON, "route"), 20, _triton_why_not))
STATISTICS.register(Backend("triton", lazy(_TRITON, "statistics"), 20, _triton_why_not))
ROUTE.register(Backend("reference", reference.route, 0, serve_all))
STATISTICS.register(Backend("reference", reference.statistics, 0, serve_all))


@remembered
def _choose(
    registry: BackendRegistry[RouterSpec, Callable[..., Any]], spec: RouterSpec, backend: str
) -> Callable[..., Any]:
    return registry.select(spec, backend).fn


def route(logits: Tensor, rule: Rule, bias: Tensor | None = None, backend: str = "auto") -> Routes:
    """Choose ``rule.k`` experts for each token. Of equal scores, the expert with the lower index is chosen.

    Nothing here waits for the device. Half-precision logits are computed in float32.

    Args:
        logits: ``[T, E]``.
        rule: how experts are scored and chosen.
        bias: ``[E]``, added to the scores for the choice alone, not for the probabilities
            (https://arxiv.org/abs/2408.15664). It gets no gradient.

    Raises:
        ValueError: the rule does not fit ``E`` experts, or a bias is given with softmax after the choice.
    """
    rule.check(logits.shape[1])
    if bias is not None and rule.score == "softmax" and not rule.pre_softmax:
        raise ValueError("a bias of the choice needs scores: use sigmoid, or softmax with pre_softmax=True.")
    spec = RouterSpec(logits.device.type, logits.dtype, logits.shape[1], rule.num_groups or 1)
    routes: Routes = _choose(ROUTE, spec, backend)(logits, rule, bias)
    return routes


def statistics(
    logits: Tensor,
    k: int,
    score: str = "softmax",
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Statistics:
    """Sum scores, choices and squared log-sums over pools of tokens, for losses that balance experts.

    The choice is the plain top-k of the scores: without bias, groups, capacity and padding. The scores are normalized
    over all experts: softmax, or sigmoid divided by its sum. Sums are in float32 (float64 for float64 logits), and the
    same for every run.

    Args:
        logits: ``[T, E]``.
        k: number of experts that a token chooses.
        score: a name in :data:`SCORES`.
        cu_seqlens: ``[S + 1]`` integers on the device: where the ``S`` pools begin, then ``T``. None: one pool.
        mask: ``[T]`` bool; tokens with False (padding) do not count.

    Raises:
        ValueError: the score is unknown, or ``k`` is more than ``E``.
    """
    # Without bias and groups: balance is measured by what the router wants, not by what it may do.
    rule = Rule(k, score)
    rule.check(logits.shape[1])
    spec = RouterSpec(logits.device.type, logits.dtype, logits.shape[1], 1)
    found: Statistics = _choose(STATISTICS, spec, backend)(logits, rule, cu_seqlens, mask)
    return found
