"""Rollouts: the policy samples answers to prompts between two steps, and rewards score them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from megalight.errors import MegalightError, integer
from megalight.inference import Completion, DynamicEngine, ParallelGPT
from megalight.inference.blocks import BLOCK_SIZE, blocks_at_once
from megalight.parallel.trace import span
from megalight.rl.environment import PromptBatch, RLTask, Score
from megalight.strategies.inference import InferenceModel

T = TypeVar("T")


class Policy(InferenceModel):
    """A module's model as one that generates, with the log-probabilities and rewards of its answers.

    Attributes:
        engine: draws answers; it is suspended between batches.
    """

    def __init__(self, model: nn.Module | None, strategy: Any = None) -> None:
        super().__init__(model, strategy)
        self.engine: DynamicEngine | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of log-probabilities."""
        return torch.promote_types(next(self.model.parameters()).dtype, torch.float32)

    def once(self, compute: Callable[[], T]) -> T:
        """Compute on the first rank of the replica, and return the result on all of them.

        Raises:
            Exception: what the first rank raises.
            MegalightError: on the others, if it raises.
        """
        model = self.model
        if not isinstance(model, ParallelGPT):
            return compute()
        value: T | None = None
        failed: Exception | None = None
        if model.first:
            try:
                value = compute()
            except Exception as error:
                failed = error
        # Others wait for it, also if it has failed.
        value, why = model.agree((value, failed and f"{type(failed).__name__}: {failed}"))
        if failed is not None:
            raise failed
        if why is not None:
            raise MegalightError(f"the first rank of this replica failed: {why}")
        return value  # type: ignore[return-value]  # it has not failed


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """How answers are sampled: from the policy itself, at temperature 1.

    Attributes:
        group_size: answers to each prompt, which are compared with each other.
        max_new_tokens: tokens of the longest answer. After a prompt for which the model has less room, answers are
            shorter, with a warning.
        validation_size: answers to each prompt in validation.
        cache_tokens: tokens for which the cache of a replica has room. None: as many as its answers can use. With
            less, answers wait for each other.
        max_sequences: answers that are sampled at a time.
        step_tokens: tokens of a forward pass.
        memory_level: where the cache lies; see :class:`~megalight.inference.engine.DynamicEngine`.
        batch_invariant: log-probabilities of answers are bitwise those of the training forward, which runs in
            :func:`~megalight.ops.batch_invariant.batch_invariant_mode`, too.
        whole_weights: with full sharding, hold all weights of this rank while answers are sampled. They are gathered
            once then, and otherwise for each forward pass, which samples one token of each answer.

    Raises:
        ConfigurationError: a value is no integer of at least 1, or the group has one answer, which has nothing to be
            compared with.
    """

    group_size: int = 8
    max_new_tokens: int = 256
    validation_size: int = 1
    cache_tokens: int | None = None
    max_sequences: int = 64
    step_tokens: int = 512
    memory_level: int = 0
    batch_invariant: bool = False
    whole_weights: bool = False

    def __post_init__(self) -> None:
        integer("group_size", self.group_size, 2)
        for name in ("max_new_tokens", "validation_size", "max_sequences", "step_tokens"):
            integer(name, getattr(self, name))
        integer("memory_level", self.memory_level, 0, 1)
        if self.cache_tokens is not None:
            integer("cache_tokens", self.cache_tokens, BLOCK_SIZE)

    def limit(self, prompt: Sequence[int], longest: int) -> int:
        """Return how long an answer to a prompt may be, for a model of ``longest`` tokens."""
        return max(1, min(self.max_new_tokens, longest - len(prompt)))


@dataclass(frozen=True)
class Trajectory:
    """A prompt and an answer.

    Attributes:
        task: the prompt.
        completion: the answer, with the log-probabilities of its tokens.
        score: what it is worth.
    """

    task: RLTask
    completion: Completion
    score: Score


def roll_out(policy: Policy, prompts: PromptBatch, options: Rollouts, size: int, seed: str) -> list[list[Trajectory]]:
    """Draw ``size`` answers to each prompt, and score them. All ranks of a replica call this together.

    The samples follow from ``seed`` and the number of the prompt, so they do not depend on the layout.

    Raises:
        MegalightError: logits of the policy hold NaN or infinity.
    """
    longest = policy.model.config.max_sequence_length
    limits = [options.limit(task.prompt, longest) for task in prompts.tasks]
    if min(limits, default=options.max_new_tokens) < options.max_new_tokens:
        warnings.warn(
            f"Prompts of more than {longest - options.max_new_tokens} tokens leave less room than "
            f"max_new_tokens={options.max_new_tokens} in the model's max_sequence_length={longest}; their answers are "
            "cut off earlier. Lower max_new_tokens, or leave such prompts out (max_prompt_tokens of the data).",
            stacklevel=2,
        )
    with span("rollouts", prompts=len(prompts.tasks)), policy.with_weights(options.whole_weights):
        engine = _engine(policy, prompts.tasks, limits, options, size)
        for task, limit in zip(prompts.tasks, limits, strict=True):
            for sample in range(size):
                engine.add(
                    task.prompt,
                    max_new_tokens=limit,
                    eos_id=prompts.ends,
                    seed=_sample_seed(seed, task.number, sample),
                    log_probs=True,
                )
        completions = list(engine.run().values())
        engine.suspend()  # its memory, before rewards take their time
        policy.engine = engine
    failed = [place for place, found in enumerate(completions) if found.reason == "error"]
    if failed:
        raise MegalightError(
            f"the policy's logits hold NaN or infinity in {len(failed)} of {len(completions)} answers, first to prompt "
            f"{prompts.tasks[failed[0] // size].number}. Has training diverged? Lower the learning rate, or start with "
            "other weights."
        )

    def score() -> list[Score]:
        return [prompts.score(place // size, found.tokens, found.reason) for place, found in enumerate(completions)]

    # Only once for a replica: a reward may be slow, or ask a service.
    with span("rewards"):
        scores = policy.once(score)
    answers = [
        Trajectory(prompts.tasks[i // size], *each) for i, each in enumerate(zip(completions, scores, strict=True))
    ]
    return [answers[first : first + size] for first in range(0, len(answers), size)]


def _engine(
    policy: Policy, tasks: Sequence[RLTask], limits: Sequence[int], options: Rollouts, size: int
) -> DynamicEngine:
    longest = [len(task.prompt) + limit for task, limit in zip(tasks, limits, strict=True)] * size
    if options.cache_tokens is None:
        blocks = blocks_at_once(longest, options.max_sequences)
    else:
        blocks = options.cache_tokens // BLOCK_SIZE
    if isinstance(policy.model, ParallelGPT):
        # Replicas that share experts construct their engines together.
        (blocks,) = policy.model.most_of_replicas([blocks])
    # After an error there is none: its requests would go on.
    engine, policy.engine = policy.engine, None
    if engine is not None and engine.num_blocks >= blocks:
        engine.resume()
        return engine
    return DynamicEngine(
        policy.model,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_sequences=options.max_sequences,
        step_tokens=options.step_tokens,
        memory_level=options.memory_level,
        batch_invariant=options.batch_invariant,
    )


def _sample_seed(seed: str, number: int, sample: int) -> int:
    name = f"{seed}/{number}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 2
