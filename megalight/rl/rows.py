"""Answers as rows of tokens to train on: packed, each with what is known of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalight.data.chat.packing import best_fit
from megalight.rl.advantages import Scale, deviation, group_advantages
from megalight.rl.loss import PolicyLoss
from megalight.rl.rollouts import Rollouts, Trajectory
from megalight.types import TokenBatch

DRAWN, ADVANTAGES, COUNTS, ENDS = "drawn", "advantages", "counts", "ends"
PER_TOKEN = {DRAWN, ADVANTAGES, COUNTS, ENDS}
"""Columns of all tokens of answers: the log-probability when it was drawn; the advantage of the answer; what it counts
in the number by which the loss is divided; and 1 at the last token of an answer."""
REWARD, SPREAD, LENGTH, TRUNCATED = "reward", "group_std", "answer_tokens", "truncated"
"""Columns of the last token of an answer: its reward; the standard deviation in its group; its number of tokens; and
whether it was cut off."""
ROUND = 64
"""Rows have a multiple of this many tokens, so that few shapes occur."""


def pack_trajectories(
    groups: Sequence[Sequence[Trajectory]],
    names: Sequence[str],
    loss: PolicyLoss,
    rollouts: Rollouts,
    *,
    scale: Scale = "group",
    longest: int,
    dtype: torch.dtype = torch.float32,
) -> TokenBatch:
    """Pack prompts and answers into as few rows as possible. Only tokens of answers count in the loss.

    Without any answer the batch is one row that has no loss.

    Args:
        groups: for each prompt its answers.
        names: of the rewards.
        loss: says what a token counts.
        rollouts: how they were drawn.
        scale: see :func:`~megalight.rl.advantages.group_advantages`.
        longest: tokens that the model reads at most. A row has no more.
        dtype: of log-probabilities and advantages.

    Returns:
        rows ``[B, S]``, with a column ``reward_<name>`` for each reward, and those above.
    """
    found = [answer for group in groups for answer in group]
    sizes = np.array([len(each.task.prompt) + len(each.completion.tokens) - 1 for each in found], np.int64)
    length = min(longest, -(-int(sizes.max(initial=1)) // ROUND) * ROUND)
    order, bounds = best_fit(sizes, length)
    rows = max(1, len(bounds) - 1)
    tokens, labels = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.long)
    mask = torch.zeros(rows, length, dtype=dtype)
    each = [REWARD, SPREAD, LENGTH, TRUNCATED, *(f"{REWARD}_{name}" for name in names)]
    columns = {name: torch.zeros(rows, length, dtype=dtype) for name in (*sorted(PER_TOKEN), *each)}
    advantages: list[float] = []
    spreads: list[float] = []
    for group in groups:
        totals = [answer.score.total for answer in group]
        advantages += group_advantages(totals, scale)
        spreads += [deviation(totals)] * len(group)
    lengths: list[tuple[int, ...]] = []
    for row in range(rows):
        at = 0
        held: list[int] = []
        places: list[int] = order[bounds[row] : bounds[row + 1]].tolist() if found else []
        for place in places:
            answer, size = found[place], int(sizes[place])
            new = answer.completion.tokens
            text = torch.tensor([*answer.task.prompt, *new])
            here = slice(at, at + size)
            tokens[row, here], labels[row, here] = text[:-1], text[1:]
            share, count = loss.shares(len(new), rollouts.max_new_tokens)
            drawn = slice(at + size - len(new), at + size)
            mask[row, drawn], columns[COUNTS][row, drawn] = share, count
            columns[DRAWN][row, drawn] = torch.tensor(answer.completion.log_probs, dtype=dtype)
            columns[ADVANTAGES][row, drawn] = advantages[place]
            _at_end(columns, (row, at + size - 1), answer, spreads[place])
            held.append(size)
            at += size
        if at < length:
            held.append(length - at)  # padding is a sequence of its own
        lengths.append(tuple(held))
    return TokenBatch(tokens, labels, mask, tuple(lengths), columns=columns).with_rows()


def _at_end(columns: dict[str, Tensor], end: tuple[int, int], answer: Trajectory, spread: float) -> None:
    columns[ENDS][end] = 1
    columns[REWARD][end] = answer.score.total
    columns[SPREAD][end] = spread
    columns[LENGTH][end] = len(answer.completion.tokens)
    columns[TRUNCATED][end] = answer.completion.reason == "length"
    for name, value in answer.score.parts.items():
        columns[f"{REWARD}_{name}"][end] = value
