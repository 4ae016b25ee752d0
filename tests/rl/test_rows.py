"""Answers as rows: every token once, with what is known of it, and advantages inside groups."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
import torch

from megalight.inference import Completion
from megalight.rl.environment import RLTask, Score
from megalight.rl.loss import Normalize, PolicyLoss, group_advantages
from megalight.rl.module import pack_trajectories
from megalight.rl.rollouts import Rollouts, Trajectory
from megalight.types import TokenBatch


def answers() -> list[list[Trajectory]]:
    """Three prompts with two answers each; the tokens of each answer are its own."""
    groups, token = [], 100
    for number in range(3):
        prompt = tuple(range(10 * number, 10 * number + 3 * number + 1))
        group = []
        for sample in range(2):
            size = 1 + 7 * sample + number
            tokens = list(range(token, token + size))
            token += size
            reason = "end" if sample else "length"
            completion = Completion(tokens, [-t / 100 for t in tokens], reason)
            group.append(Trajectory(RLTask(prompt), completion, Score(number + 2.0 * sample, {"a": float(sample)})))
        groups.append(group)
    return groups


def packed(groups: Sequence[Sequence[Trajectory]], loss: PolicyLoss | None = None, longest: int = 24) -> TokenBatch:
    return pack_trajectories(
        groups, ["a"], loss or PolicyLoss(), Rollouts(max_new_tokens=20), longest=longest, dtype=torch.float64
    )


def test_rows_hold_each_answer_once() -> None:
    groups = answers()
    batch = packed(groups)
    assert batch.tokens.shape[1] == 24  # the model reads no more
    assert batch.document_lengths is not None
    found = {}
    for row, lengths in enumerate(batch.document_lengths):
        assert sum(lengths) == 24
        at = 0
        for size in lengths:
            here = (row, slice(at, at + size))
            at += size
            drawn = batch.loss_mask[here] != 0
            if drawn.any():
                text = (*batch.tokens[here][~drawn].tolist(), *batch.tokens[here][drawn].tolist())
                new = batch.labels[here][drawn]
                found[tuple(new.tolist())] = (*text, int(new[-1])), here, drawn
    for group in groups:
        advantages = group_advantages([each.score.total for each in group])
        for each, advantage in zip(group, advantages, strict=True):
            new = each.completion.tokens
            text, here, drawn = found.pop(tuple(new))
            assert text == (*each.task.prompt, *new)
            assert batch.columns["old_log_probs"][here][drawn].tolist() == each.completion.log_probs
            assert batch.columns["advantages"][here][drawn].tolist() == [advantage] * len(new)
            assert batch.columns["counts"][here].sum() == len(new)
            ends = batch.columns["ends"][here]
            assert ends.tolist() == [0] * (len(ends) - 1) + [1]
            last = {name: float(column[here][-1]) for name, column in batch.columns.items()}
            assert last["reward"] == each.score.total
            assert last["reward_a"] == each.score.parts["a"]
            assert last["answer_tokens"] == len(new)
            assert last["truncated"] == (each.completion.reason == "length")
            assert last["group_std"] == pytest.approx(statistics.stdev([0, 2.0]))
    assert not found


def test_rows_are_as_long_as_the_longest_answer_needs() -> None:
    assert packed(answers(), longest=4096).tokens.shape == (1, 64)


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
def test_answers_count_as_the_loss_says(normalize: Normalize) -> None:
    groups = answers()
    batch = packed(groups, PolicyLoss(normalize=normalize))
    sizes = [len(each.completion.tokens) for group in groups for each in group]
    shares = {"token": sizes, "sequence": [1] * 6, "constant": [size / 20 for size in sizes]}[normalize]
    assert batch.loss_mask.sum().item() == pytest.approx(sum(shares))
    assert batch.columns["counts"].sum().item() == pytest.approx(sum(sizes) if normalize == "token" else 6)


def test_no_answers_are_a_row_without_a_loss() -> None:
    batch = packed([])
    assert batch.tokens.shape == (1, 24)
    assert batch.document_lengths == ((24,),)
    assert not batch.loss_mask.any()
    assert "reward_a" in batch.columns


def test_equal_rewards_have_no_advantage() -> None:
    assert group_advantages([0.1] * 3) == [0.0] * 3
    assert group_advantages([5.0]) == [0.0]


def test_advantages_have_the_mean_0_and_the_deviation_1() -> None:
    found = group_advantages([1.0, 2.0, 6.0])
    assert sum(found) == pytest.approx(0)
    assert statistics.stdev(found) == pytest.approx(1, rel=1e-3)
    assert group_advantages([1.0, 2.0, 6.0], "none") == [-2.0, -1.0, 3.0]
