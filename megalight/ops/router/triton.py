"""The router: one kernel for the choice, one for its gradient, and two more for the statistics."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl
from megalight.ops.router import EPS, Routes, Rule, Statistics

TILE = 2048
"""Logits that a program handles at once."""
PROGRAMS = 512
"""Programs that sum statistics, over all pools."""


@jit
def _softmax(x: Value) -> Any:
    """Return the softmax of each row, and the logarithm of its sum."""
    largest = tl.max(x, 1)
    y = tl.exp(x - largest[:, None])
    total = tl.sum(y, 1)
    return y / total[:, None], largest + tl.log(total)


@jit
def _best_groups(
    choice: Value, ROWS: constexpr, EXPERTS: constexpr, GROUPS: constexpr, BEST: constexpr, KEPT: constexpr
) -> Value:
    """Replace the values of all but the ``KEPT`` best groups by -inf; a group's sum is over its ``BEST`` best."""
    grouped = tl.reshape(choice, (ROWS, GROUPS, EXPERTS // GROUPS))
    member = tl.arange(0, EXPERTS // GROUPS)[None, None, :]
    group = tl.arange(0, GROUPS)[None, :]
    totals = tl.zeros((ROWS, GROUPS), tl.float32)
    rest = grouped
    for _ in tl.static_range(BEST):
        totals += tl.max(rest, 2)
        # Take the best, remove it, repeat: a sort of all experts costs more for the few that are wanted.
        rest = tl.where(member == tl.argmax(rest, 2)[:, :, None], float("-inf"), rest)
    kept = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in tl.static_range(KEPT):
        hit = group == tl.argmax(totals, 1)[:, None]
        kept = tl.where(hit, 1, kept)
        totals = tl.where(hit, float("-inf"), totals)
    return tl.reshape(tl.where(kept[:, :, None] > 0, grouped, float("-inf")), (ROWS, EXPERTS))


@jit
def _route(
    logits: Value, bias: Value, probs: Value, experts: Value, tokens: Value, num_experts: Value, scale: Value,
    EPS: constexpr, SCORE: constexpr, BIAS: constexpr, GROUPS: constexpr, BEST: constexpr, KEPT: constexpr,
    K: constexpr, WIDTH: constexpr, ROWS: constexpr, EXPERTS: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, WIDTH)[None, :]
    known = (row < tokens)[:, None] & (expert < num_experts)[None, :]
    place = row.to(tl.int64)[:, None] * num_experts + expert[None, :]
    # rows after the last token hold zeros, which keep their sums finite
    score = tl.load(logits + place, mask=known, other=0.0).to(tl.float32)
    score = tl.where((expert < num_experts)[None, :], score, float("-inf"))
    if SCORE == "sigmoid":
        score = tl.sigmoid(score)
    elif SCORE == "before":
        score, _ = _softmax(score)
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=expert < num_experts, other=0.0).to(tl.float32)[None, :]
    # Again, because a sigmoid of -inf is 0, which would beat negative biased scores.
    choice = tl.where((expert < num_experts)[None, :], choice, float("-inf"))
    if GROUPS > 1:
        choice = _best_groups(choice, ROWS, EXPERTS, GROUPS, BEST, KEPT)
    chosen = tl.zeros((ROWS, WIDTH), tl.int32)
    values = tl.full((ROWS, WIDTH), float("-inf"), tl.float32)
    for j in tl.static_range(K):
        best = tl.argmax(choice, 1)  # of equal values, the first
        hit = expert[None, :] == best[:, None]
        chosen = tl.where(slot == j, best[:, None], chosen)
        # The probability comes from the score without bias: the bias only steers the choice.
        values = tl.where(slot == j, tl.sum(tl.where(hit, score, 0.0), 1)[:, None], values)
        choice = tl.where(hit, float("-inf"), choice)
    if SCORE == "after":
        values, _ = _softmax(values)
    if SCORE == "sigmoid" and K > 1:
        # Slots are padded to a power of two, with -inf.
        values = tl.where(slot < K, values, 0.0)
        values /= tl.sum(values, 1)[:, None] + EPS
    stored = (row < tokens)[:, None] & (slot < K)
    target = row.to(tl.int64)[:, None] * K + slot
    tl.store(probs + target, values * scale, mask=stored)
    tl.store(experts + target, chosen.to(tl.int64), mask=stored)


@jit
def _route_backward(
    logits: Value, experts: Value, grad: Value, grad_logits: Value, tokens: Value, num_experts: Value, scale: Value,
    EPS: constexpr, SCORE: constexpr, K: constexpr, ROWS: constexpr, EXPERTS: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    known = (row < tokens)[:, None] & (expert < num_experts)[None, :]
    place = row.to(tl.int64)[:, None] * num_experts + expert[None, :]
    score = tl.load(logits + place, mask=known, other=0.0).to(tl.float32)
    score = tl.where((expert < num_experts)[None, :], score, float("-inf"))
    slope = tl.zeros((ROWS, EXPERTS), tl.float32)  # the gradient of the chosen probabilities, zeros elsewhere
    chosen = tl.zeros((ROWS, EXPERTS), tl.int32)
    for j in tl.static_range(K):
        # Rows after the last token get experts 0 to K - 1: with none chosen, their softmax would be NaN.
        index = tl.load(experts + row.to(tl.int64) * K + j, mask=row < tokens, other=j)
        value = tl.load(grad + row.to(tl.int64) * K + j, mask=row < tokens, other=0.0) * scale
        hit = expert[None, :] == index[:, None]
        chosen = tl.where(hit, 1, chosen)
        slope = tl.where(hit, value[:, None], slope)
    if SCORE == "sigmoid":
        score = tl.sigmoid(score)
        out = slope * score * (1.0 - score)
        if K > 1:
            total = tl.sum(tl.where(chosen > 0, score, 0.0), 1) + EPS
            # p = s / sum(s): dp/ds is (slope - mean) / total, where `mean` is the sum of slope * p.
            mean = tl.sum(slope * score, 1) / total
            out = tl.where(chosen > 0, (slope - mean[:, None]) / total[:, None] * score * (1.0 - score), 0.0)
    else:
        if SCORE == "after":
            score = tl.where(chosen > 0, score, float("-inf"))
        probs, _ = _softmax(score)
        # The gradient of a softmax; unchosen experts have a probability of 0 in it after the choice.
        out = probs * (slope - tl.sum(probs * slope, 1)[:, None])
    tl.store(grad_logits + place, out.to(grad_logits.dtype.element_ty), mask=known)


@jit
def _statistics(
    logits: Value, cu_seqlens: Value, mask: Value, sums: Value, tokens: Value, num_experts: Value,
    EPS: constexpr, SCORE: constexpr, POOLS: constexpr, MASK: constexpr, K: constexpr, ROWS: constexpr,
    EXPERTS: constexpr,
) -> None:  # fmt: skip
    """Sums over one program's tokens of a pool: of scores, of choices, and of squared log-sums, side by side."""
    expert = tl.arange(0, EXPERTS)
    scores = tl.zeros((ROWS, EXPERTS), tl.float32)
    counts = tl.zeros((ROWS, EXPERTS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    start, end = 0, tokens
    if POOLS:
        start = tl.load(cu_seqlens + tl.program_id(0)).to(tl.int32)
        end = tl.load(cu_seqlens + tl.program_id(0) + 1).to(tl.int32)
    for first in range(start + tl.program_id(1) * ROWS, end, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        counted = row < end
        if MASK:
            counted &= tl.load(mask + row, mask=row < end, other=0) != 0
        known = counted[:, None] & (expert < num_experts)[None, :]
        place = row.to(tl.int64)[:, None] * num_experts + expert[None, :]
        logit = tl.load(logits + place, mask=known, other=0.0).to(tl.float32)
        logit = tl.where((expert < num_experts)[None, :], logit, float("-inf"))
        score, lse = _softmax(logit)
        if SCORE == "sigmoid":
            score = tl.sigmoid(logit)
            score /= tl.sum(score, 1)[:, None] + EPS
        scores += tl.where(counted[:, None], score, 0.0)
        squares += tl.where(counted, lse * lse, 0.0)
        for _ in tl.static_range(K):
            hit = expert[None, :] == tl.argmax(logit, 1)[:, None]
            counts += tl.where(hit & counted[:, None], 1.0, 0.0)
            logit = tl.where(hit, float("-inf"), logit)
    # Each program has a place of its own, and torch sums the places: unlike atomics, the same in every run.
    target = sums + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (2 * num_experts + 1)
    tl.store(target + expert, tl.sum(scores, 0), mask=expert < num_experts)
    tl.store(target + num_experts + expert, tl.sum(counts, 0), mask=expert < num_experts)
    tl.store(target + 2 * num_experts, tl.sum(squares, 0))


@jit
def _statistics_backward(
    logits: Value, cu_seqlens: Value, mask: Value, grad: Value, grad_logits: Value, tokens: Value, num_experts: Value,
    EPS: constexpr, SCORE: constexpr, POOLS: constexpr, MASK: constexpr, ROWS: constexpr, EXPERTS: constexpr,
) -> None:  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    start, end = 0, tokens
    if POOLS:
        start = tl.load(cu_seqlens + tl.program_id(0)).to(tl.int32)
        end = tl.load(cu_seqlens + tl.program_id(0) + 1).to(tl.int32)
    grad += tl.program_id(0) * (2 * num_experts + 1)
    slope = tl.load(grad + expert, mask=expert < num_experts, other=0.0)[None, :]
    square = tl.load(grad + 2 * num_experts)
    for first in range(start + tl.program_id(1) * ROWS, end, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        known = (row < end)[:, None] & (expert < num_experts)[None, :]
        place = row.to(tl.int64)[:, None] * num_experts + expert[None, :]
        logit = tl.load(logits + place, mask=known, other=0.0).to(tl.float32)
        logit = tl.where((expert < num_experts)[None, :], logit, float("-inf"))
        probs, lse = _softmax(logit)
        out = probs * (2.0 * square * lse)[:, None]
        if SCORE == "sigmoid":
            score = tl.sigmoid(logit)
            total = tl.sum(score, 1) + EPS
            mean = tl.sum(score * slope, 1) / total
            out += (slope - mean[:, None]) / total[:, None] * score * (1.0 - score)
        else:
            out += probs * (slope - tl.sum(probs * slope, 1)[:, None])
        if MASK:
            out = tl.where((tl.load(mask + row, mask=row < end, other=0) != 0)[:, None], out, 0.0)
        tl.store(grad_logits + place, out.to(grad_logits.dtype.element_ty), mask=known)


@lru_cache
def _tile(num_experts: int) -> dict[str, int]:
    width = max(2, next_power(num_experts))
    return {"ROWS": max(1, min(64, TILE // width)), "EXPERTS": width, "num_warps": 4}


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rule: Rule, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        tokens, num_experts = logits.shape
        probs = torch.empty(tokens, rule.k, dtype=torch.float32, device=logits.device)
        experts = torch.empty(tokens, rule.k, dtype=torch.int64, device=logits.device)
        tile = _tile(num_experts)
        score = rule.score if rule.score == "sigmoid" else "before" if rule.pre_softmax else "after"
        if tokens:
            _route[(cdiv(tokens, tile["ROWS"]),)](
                logits, None if bias is None else bias.contiguous(), probs, experts, tokens, num_experts,
                float(rule.scale),
                EPS=EPS, SCORE=score, BIAS=bias is not None, GROUPS=rule.num_groups or 1,
                BEST=1 if rule.num_groups is None else rule.best_of_group, KEPT=rule.group_top_k or 1, K=rule.k,
                WIDTH=next_power(rule.k), **tile,
            )  # fmt: skip
        ctx.save_for_backward(logits, experts)
        ctx.score, ctx.scale = score, float(rule.scale)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        return probs, experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        logits, experts = ctx.saved_tensors
        (tokens, num_experts), k = logits.shape, experts.shape[1]
        grad_logits, tile = torch.empty_like(logits), _tile(num_experts)
        if tokens:
            _route_backward[(cdiv(tokens, tile["ROWS"]),)](
                logits, experts, grad.contiguous(), grad_logits, tokens, num_experts, ctx.scale,
                EPS=EPS, SCORE=ctx.score, K=k, **tile,
            )  # fmt: skip
        return grad_logits, None, None


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rule: Rule, cu_seqlens: Tensor | None, mask: Tensor | None) -> Tensor:
        logits = logits.contiguous()
        tokens, num_experts = logits.shape
        mask = None if mask is None else mask.contiguous()
        tile = _tile(num_experts)
        pools = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        # Few programs, each with many tokens: each writes a row of sums, and torch adds these rows up.
        blocks = max(1, min(cdiv(tokens, tile["ROWS"]), PROGRAMS // max(1, pools)))
        sums = torch.empty(pools, blocks, 2 * num_experts + 1, dtype=torch.float32, device=logits.device)
        ctx.grid = pools, blocks
        ctx.options = {"SCORE": rule.score, "POOLS": cu_seqlens is not None, "MASK": mask is not None, "EPS": EPS}
        ctx.options.update(tile)
        ctx.save_for_backward(logits, cu_seqlens, mask)
        if pools:
            _statistics[ctx.grid](logits, cu_seqlens, mask, sums, tokens, num_experts, K=rule.k, **ctx.options)
        return sums.sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, cu_seqlens, mask = ctx.saved_tensors
        tokens, num_experts = logits.shape
        grad_logits = torch.empty_like(logits)
        if tokens:
            _statistics_backward[ctx.grid](
                logits, cu_seqlens, mask, grad.contiguous(), grad_logits, tokens, num_experts, **ctx.options
            )
        return grad_logits, None, None, None


def route(logits: Tensor, rule: Rule, bias: Tensor | None) -> Routes:
    """Implement :func:`megalight.ops.router.route`."""
    return Routes(*apply(_Route, logits, rule, bias))


def statistics(logits: Tensor, rule: Rule, cu_seqlens: Tensor | None, mask: Tensor | None) -> Statistics:
    """Implement :func:`megalight.ops.router.statistics`."""
    sums: Tensor = apply(_Statistics, logits, rule, cu_seqlens, mask)
    scores, counts, squares = torch.split(sums, [logits.shape[1], logits.shape[1], 1], -1)
    return Statistics(scores, counts.detach(), squares.squeeze(-1))
