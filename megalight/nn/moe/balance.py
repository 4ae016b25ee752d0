"""Losses of a router that keep its experts equally busy and its logits small."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalight.nn.context import LayerContext
from megalight.ops.router import Statistics, statistics

if TYPE_CHECKING:
    from megalight.nn.moe.config import BalanceConfig
    from megalight.nn.moe.router import Router
    from megalight.types import PackedSequences


def losses(router: Router, logits: Tensor, context: LayerContext) -> dict[str, Tensor]:
    """Return this device's terms of a router's losses by name, without their coefficients; ``logits [T, E]``."""
    found = {}
    config, pool, top_k, score = router.balance, router.pool, router.config.top_k, router.config.score
    mask = pool.mask(context.sequences)
    if config.aux_loss or config.global_aux_loss or config.z_loss:
        # One pass over the logits gives the sums of all three losses.
        sums = statistics(logits, top_k, score, mask=mask)
    if mask is None and pool.whole and not config.global_aux_loss and logits.shape[0]:
        # The usual case, with few kernels: the host knows all numbers of tokens.
        if config.aux_loss:
            found["aux_loss"] = whole_balance_loss(sums, logits.shape[0], top_k)
        if config.z_loss:
            found["z_loss"] = sums.squares.sum() / logits.shape[0]
    elif config.aux_loss or config.global_aux_loss or config.z_loss:
        counts = torch.cat([sums.counts, _numbers(logits, None, mask)[:, None]], 1)
        # Over the devices that share the micro-batch. Counts have no gradient, so this needs no backward.
        means = pool.mean(counts)
        if config.aux_loss:
            found["aux_loss"] = balance_loss(sums, means, means, top_k)
        if config.global_aux_loss:
            loads = router.running.add(pool.mean_of_replicas(counts), context)
            found["global_aux_loss"] = balance_loss(sums, means, loads, top_k)
        if config.z_loss:
            found["z_loss"] = (sums.squares * _inverse(means[:, -1])).sum()
    if config.seq_aux_loss:
        bounds = pool.bounds(context.sequences)
        sums = statistics(logits, top_k, score, bounds, mask)
        means = pool.mean(torch.cat([sums.counts, _numbers(logits, bounds, mask)[:, None]], 1))
        found["seq_aux_loss"] = balance_loss(sums, means, means, top_k)
    # In the order of the configuration: the counts of a step are added place by place.
    return {name: found[name] for name in config.names}


_COUNTED: dict[str, Callable[[PackedSequences], int]] = {
    "seq_aux_loss": lambda sequences: sequences.num_sequences,
    "z_loss": lambda sequences: sequences.num_real_tokens,
}
"""What these losses of a micro-batch are means over; the others are those of a whole micro-batch."""


def count_of(name: str, sequences: PackedSequences) -> int:
    """Return the number of sequences or tokens that a loss of a micro-batch is the mean over, or 1."""
    return _COUNTED[name](sequences) if name in _COUNTED else 1


def counts_of(config: BalanceConfig, sequences: PackedSequences) -> dict[str, Tensor]:
    """Return the counts of losses over sequences or tokens, by their names in logs.

    A task returns them in ``aux_loss_counts``. Then each is the mean over all sequences, or tokens, of a step, however
    these divide into micro-batches.
    """
    names = [name for name in config.names if name in _COUNTED]
    # Made on the device, so that a CUDA graph can record it; batches of other sequences have a graph of their own.
    return {f"router_{name}": torch.full((), count_of(name, sequences), device=sequences.device) for name in names}


def balance_loss(sums: Statistics, means: Tensor, loads: Tensor, top_k: int) -> Tensor:
    """``E * sum_e f_e P_e``, 1 for balanced experts; the mean over pools (https://arxiv.org/abs/2101.03961).

    ``f_e`` is the share of expert ``e`` in all choices, and ``P_e`` the mean of its scores over the tokens of a pool.

    Args:
        sums: this device's sums for each of ``S`` pools.
        means: ``[S, E + 1]``, over the devices of the pool: the counts of choices, and the number of tokens.
        loads: ``[S, E + 1]``, the same for ``f_e``, up to a factor.
        top_k: number of experts of each token.
    """
    tokens = means[:, -1:]
    # a mean over the devices: the mean of this device's quotient with it, over the devices, is that of the sums
    shares, scores = loads[:, :-1] * _inverse(top_k * loads[:, -1:]), sums.scores * _inverse(tokens)
    return scores.shape[1] * (scores * shares).sum() / (tokens > 0).sum().clamp(min=1)


def whole_balance_loss(sums: Statistics, tokens: int, top_k: int) -> Tensor:
    """Return :func:`balance_loss` of one pool whose ``tokens`` are all on this device."""
    return (sums.scores * sums.counts).sum() * (sums.scores.shape[1] / (top_k * tokens**2))


def _numbers(logits: Tensor, bounds: Tensor | None, mask: Tensor | None) -> Tensor:
    """``[S]``: the number of tokens of each pool that count."""
    if mask is None:
        return logits.new_full((1,), len(logits)) if bounds is None else bounds.diff().to(logits.dtype)
    if bounds is None:
        return mask.sum(0, keepdim=True).to(logits.dtype)
    # The number of tokens that count before each place, so that two bounds give that of a sequence.
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    return before[bounds.long()].diff().to(logits.dtype)


def _inverse(count: Tensor) -> Tensor:
    """``1 / count``; 0 for a pool without tokens."""
    # By infinity, not by a mask afterwards: the gradient of 1 / 0 would be NaN even where it is masked.
    return torch.where(count > 0, count, torch.inf).reciprocal()
