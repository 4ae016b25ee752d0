"""A small policy, an environment that needs no tokenizer, and a loader of its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from megalight.rl.environment import Answer, Environment, PromptBatch, RLTask
from megalight.rl.module import GRPO, GRPOModule, HFGRPOModule
from megalight.rl.rollouts import Rollouts
from tests.strategies.training import BASE, SEED

CONFIG = replace(BASE, vocab_size=20, max_sequence_length=32)
END = 3
ROLLOUTS = Rollouts(group_size=3, max_new_tokens=6, step_tokens=16)
PROMPTS = [[1, 2], [7, 8, 9], [4], [10, 11, 12, 13], [5, 5], [6, 1, 2], [19], [2, 3, 4]]
LR = 1e-2


class Words:
    """Stands for a tokenizer: each token is a word."""

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def decode_after(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        return self.decode(tokens)


def large(answer: Answer, row: Mapping[str, Any]) -> float:
    """How many of its tokens are at least as large as the row asks for."""
    return sum(token >= row["least"] for token in answer.tokens) / len(answer.tokens)


def short(answer: Answer, row: Mapping[str, Any]) -> float:
    return -float(len(answer.tokens))


def environment() -> Environment:
    words: Any = Words()
    return Environment(words, {"large": large, "short": short}, {"short": 0.1}, ends=[END])


def prompts_of(step: int, rows: int = 4) -> list[RLTask]:
    """The prompts of a step, over all replicas."""
    numbers = [(step * rows + place) % len(PROMPTS) for place in range(rows)]
    return [RLTask(tuple(PROMPTS[number]), {"least": 8 + number % 3}, number) for number in numbers]


class Prompted(GRPO[Any]):
    """Two steps of four prompts, shared by the replicas."""

    def __init__(self, steps: int = 2, **options: Any) -> None:
        super().__init__(**{"seed": SEED, "rollouts": ROLLOUTS, **options})
        self.steps = steps
        self.seen: list[list[list[list[int]]]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LR)

    def on_answers(self, prompts: PromptBatch, groups: Any) -> None:
        self.seen.append([[answer.completion.tokens for answer in group] for group in groups])

    def train_dataloader(self) -> DataLoader[Any]:
        share = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        size = 4 // share["num_replicas"]
        own = slice(size * share["rank"], size * (share["rank"] + 1))
        batches = [PromptBatch(prompts_of(step)[own], environment()) for step in range(self.steps)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


class Policy(Prompted, GRPOModule):
    """A tiny GPT."""

    def __init__(self, steps: int = 2, **options: Any) -> None:
        super().__init__(steps, **{"config": CONFIG, **options})


class HFPolicy(Prompted, HFGRPOModule):
    """A model of ``transformers``."""
