"""Losses of a router that keep its experts equally busy and its logits small."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.nn.moe.config import BalanceConfig
from megalight.nn.moe.pool import Pool
from megalight.ops.router import Statistics, statistics
from megalight.types import PackedSequences


def losses(
    logits: Tensor, top_k: int, score: str, config: BalanceConfig, pool: Pool, sequences: PackedSequences
) -> dict[str, Tensor]:
    """Return this device's terms of all losses with a coefficient, by name, without the coefficients.

    Args:
        logits: ``[T, E]`` with gradient.
        top_k: number of experts of each token.
        score: ``softmax`` or ``sigmoid``.
        config: coefficients.
        pool: where the tokens of the micro-batch are.
        sequences: how these tokens divide into sequences.
    """
    found = {}
    mask = pool.mask(sequences)
    if config.aux_loss or config.z_loss:
        sums = statistics(logits, top_k, score, mask=mask)
        means = pool.mean(torch.cat([sums.counts, _numbers(logits, None, mask)[:, None]], 1))
        if config.aux_loss:
            found["aux_loss"] = balance_loss(sums, means, top_k)
        if config.z_loss:
            found["z_loss"] = (sums.squares * _inverse(means[:, -1])).sum()
    return found


def balance_loss(sums: Statistics, means: Tensor, top_k: int) -> Tensor:
    """``E * sum_e f_e P_e``, 1 for balanced experts; the mean over pools (https://arxiv.org/abs/2101.03961).

    ``f_e`` is the share of expert ``e`` in the choices of all tokens of a pool, and ``P_e`` the mean of its scores.

    Args:
        sums: this device's sums for each of ``S`` pools.
        means: ``[S, E + 1]``, over the devices: the counts of choices, and the number of tokens.
        top_k: number of experts of each token.
    """
    counts, tokens = means[:, :-1], means[:, -1:]
    # means over the devices: their quotients are those of the sums
    shares, scores = counts * _inverse(top_k * tokens), sums.scores * _inverse(tokens)
    return counts.shape[1] * (scores * shares).sum() / (tokens > 0).sum().clamp(min=1)


def _numbers(logits: Tensor, bounds: Tensor | None, mask: Tensor | None) -> Tensor:
    """``[S]``: the number of tokens of each pool that count."""
    if mask is None:
        return logits.new_full((1,), len(logits)) if bounds is None else bounds.diff().to(logits.dtype)
    if bounds is None:
        return mask.sum(0, keepdim=True).to(logits.dtype)
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    return before[bounds.long()].diff().to(logits.dtype)


def _inverse(count: Tensor) -> Tensor:
    """``1 / count``; 0 for a pool without tokens."""
    return torch.where(count > 0, count, torch.inf).reciprocal()
