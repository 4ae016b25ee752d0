"""GRPO as a LightningModule: answers are sampled, scored and compared, and the policy learns from them."""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from megalight.data.chat.dataset import best_fit
from megalight.errors import ConfigurationError, DataError
from megalight.models.batches import masked_sum
from megalight.models.config import require_choice
from megalight.models.family.module import ConfigT, FamilyModule
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.models.hf_causal_lm.config import HFConfig
from megalight.models.hf_causal_lm.module import HFCausalLM
from megalight.models.loading import Keys
from megalight.models.module import Carry
from megalight.ops.batch_invariant import batch_invariant_mode
from megalight.optim import AdamConfig
from megalight.parallel.frozen_model import FrozenModel
from megalight.parallel.layout import Layout
from megalight.rl.environment import PromptBatch
from megalight.rl.loss import PolicyLoss, Scale, deviation, divergence, group_advantages
from megalight.rl.rollouts import Policy, Rollouts, Trajectory, roll_out
from megalight.types import Loss, TokenBatch, WithResults
from megalight.types.batch import contents, emptied, is_empty, opened

OLD_LOG_PROBS, ADVANTAGES, COUNTS, ENDS = "old_log_probs", "advantages", "counts", "ends"
PER_TOKEN = {OLD_LOG_PROBS, ADVANTAGES, COUNTS, ENDS}
"""Columns of all tokens of answers: the log-probability when it was sampled; the advantage of the answer; what it
counts in the number by which the loss is divided; and 1 at the last token of an answer."""
REWARD, SPREAD, LENGTH, TRUNCATED = "reward", "group_std", "answer_tokens", "truncated"
"""Columns of the last token of an answer: its reward; the standard deviation in its group; its number of tokens; and
whether it was cut off."""
ROUND = 64
"""Rows have a multiple of this many tokens, so that few shapes occur."""


REFERENCE = "reference"
"""Name of the reference policy among the frozen models of a run."""


class GRPO(FamilyModule[ConfigT]):
    """Trains a policy on rewards, with group relative policy optimization (https://arxiv.org/abs/2402.03300).

    A batch is a :class:`~megalight.rl.environment.PromptBatch`: this replica's share of the prompts of a step. Before
    the step, the policy samples a group of answers to each, in the layout in which it trains. The environment scores
    them, and the step trains on them, packed into rows: ``micro_batch_size`` counts rows.

    It goes before the module of a family among the bases of a class: :class:`GRPOModule`, :class:`HFGRPOModule`.

    Args:
        config: the policy; see the module of the family.
        optimizer: settings of Adam, parameter groups and learning-rate schedule.
        seed: seed of the initial weights, and of samples. They are the same in every layout, up to rounding.
        weights: a checkpoint, a run's folder, or a ``transformers`` folder to start from.
        weights_keys: see :class:`~megalight.models.family.module.FamilyModule`.
        rollouts: how answers are sampled.
        loss: what the policy learns from them.
        advantages: ``group`` or ``none``: see :func:`~megalight.rl.loss.group_advantages`.
        reference: a checkpoint, a run's folder, or a ``transformers`` folder with the reference policy, for
            ``loss.kl``. None: ``weights``. It is in no checkpoint.
        reference_layout: its own layout, over the same ranks.

    Logs, besides those of :class:`~megalight.models.module.MegalightModule`, in training and validation:
        train_reward: mean reward of answers. ``train_reward_<name>``: that of one reward, before its weight.
        train_group_std: mean standard deviation of the rewards in a group. Groups without any teach nothing.
        train_answer_tokens: mean number of tokens of an answer.
        train_truncated: how many answers were cut off.
        train_entropy: mean of ``-log p`` of the tokens of answers, in nats.
        train_clipped: how many tokens are clipped.
        train_drift: mean divergence of the policy that drew from the one that trains, in nats: rounding, unless
            weights changed in between.
        train_kl: mean divergence from the reference, with ``loss.kl``.

    Raises:
        ConfigurationError: the model has dropout or multi-token prediction, it has no room for ``max_new_tokens``, or
            there is no reference for ``loss.kl``.
    """

    def __init__(
        self,
        config: ConfigT | str | None = None,
        optimizer: AdamConfig | None = None,
        seed: int = 1234,
        weights: str | os.PathLike[str] | None = None,
        weights_keys: Keys = "strict",
        rollouts: Rollouts | None = None,
        loss: PolicyLoss | None = None,
        advantages: Scale = "group",
        reference: str | os.PathLike[str] | None = None,
        reference_layout: Layout | None = None,
    ) -> None:
        super().__init__(config, optimizer, seed, weights, weights_keys)
        self.rollouts = rollouts or Rollouts()
        self.policy_loss = loss or PolicyLoss()
        require_choice("advantages", advantages, get_args(Scale))
        self.advantages: Scale = advantages
        self.reference_layout = reference_layout or Layout()
        self._reference: FamilyModule[ConfigT] | None = None
        self._held: TokenBatch | None = None
        # With its engine, which is suspended between batches.
        self._policy: Policy | None = None
        self._check()
        # Lightning warns that this hook is used beside a data module. It is meant to be.
        warnings.filterwarnings("ignore", "You have overridden `on_before_batch_transfer`")
        if self.policy_loss.kl:
            folder = self.weights if reference is None else reference
            if folder is None:
                raise ConfigurationError(
                    "loss.kl compares with a reference policy, and there is none: give its folder (reference, or "
                    "weights to begin with), or set loss.kl to 0."
                )
            self._reference = self.alone(folder)
            if self._reference.config.vocab_size != self.config.vocab_size:
                raise ConfigurationError(
                    f"the reference in {folder} has vocab_size={self._reference.config.vocab_size}, and the policy has "
                    f"{self.config.vocab_size}: their probabilities cannot be compared. Use a reference with the "
                    "policy's tokenizer."
                )
        elif reference is not None:
            raise ConfigurationError("reference has no effect while loss.kl is 0; set loss.kl, or leave it out.")

    @abstractmethod
    def alone(self, weights: str | os.PathLike[str]) -> FamilyModule[ConfigT]:
        """Return the module of the family around a model in a folder, which gives losses of tokens."""

    @abstractmethod
    def dropout_of(self, config: ConfigT) -> Mapping[str, float]:
        """Return the probabilities of dropout in a model that are not 0, by name."""

    def _check(self) -> None:
        room, longest = self.config.max_sequence_length - 1, self.rollouts.max_new_tokens
        if longest > room:
            raise ConfigurationError(
                f"rollouts.max_new_tokens is {longest}, and the model has room for {room} tokens after the shortest "
                f"prompt (max_sequence_length={room + 1}); set it to {room} or less."
            )
        if dropout := self.dropout_of(self.config):
            raise ConfigurationError(
                f"the model has dropout ({', '.join(f'{name}={p}' for name, p in dropout.items())}), so that it would "
                "train with other probabilities than it samples with. Set it to 0 in config."
            )

    def forward_step(self, model: nn.Module, batch: TokenBatch | WithResults, carry: Carry | None = None) -> Carry:
        """See :class:`GPTModule`."""
        with batch_invariant_mode(self.rollouts.batch_invariant):
            return super().forward_step(model, batch, carry)

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the reference policy, if there is one."""
        if self._reference is None:
            return {}
        declared = FrozenModel(
            layout=self.reference_layout,
            task=self._reference,
            source=self._reference.initial_weights(),
            for_last_stage=True,
        )
        return {REFERENCE: declared}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Replace prompts by answers to them, which are sampled now. Other batches are left as they are."""
        prompts = contents(batch)
        if not isinstance(prompts, PromptBatch):
            return batch
        held = None if prompts.fresh or not self._trains else self._held
        answers = self.answers(prompts) if held is None else held
        if self._trains:
            self._held = answers
        return emptied(answers) if is_empty(batch) else answers

    def answers(self, prompts: PromptBatch) -> TokenBatch:
        """Draw and score answers; return them as rows to train on. All ranks of a replica call this together."""
        trainer = self._trainer
        strategy = None if trainer is None else trainer.strategy
        if self._policy is None or not self._policy.serves(self.model, strategy):
            self._policy = Policy(self.model, strategy)
        policy = self._policy
        size = self.rollouts.group_size if self._trains else self.rollouts.validation_size
        # In validation the same samples each time, so that only the policy changes.
        seed = f"{self.seed}/{self.global_step}" if self._trains else f"{self.seed}/validation"
        groups = roll_out(policy, prompts, self.rollouts, size, seed)
        self.on_answers(prompts, groups)
        for callback in [] if trainer is None else trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "on_answers"):
                callback.on_answers(trainer, self, prompts, groups)
        return pack_trajectories(
            groups,
            prompts.names,
            self.policy_loss,
            self.rollouts,
            scale=self.advantages,
            longest=self.config.max_sequence_length,
            dtype=policy.dtype,
        )

    def teardown(self, stage: str) -> None:
        """Forget the engine of rollouts."""
        super().teardown(stage)
        self._policy = None

    @property
    def _trains(self) -> bool:
        return self._trainer is None or bool(self._trainer.training)

    def on_answers(self, prompts: PromptBatch, groups: list[list[Trajectory]]) -> None:
        """Called with the answers to each prompt, on all ranks of the replica, before they are trained on.

        A callback's ``on_answers(trainer, module, prompts, groups)`` is called after it.
        """

    def loss_step(self, carry: Carry, batch: TokenBatch | WithResults) -> Loss:
        """Return the policy's loss; see :class:`~megalight.rl.loss.PolicyLoss`."""
        rows, results = opened(batch)
        if OLD_LOG_PROBS not in rows.columns:
            raise DataError(
                f"the batch has no answers: {type(self).__name__} trains on prompts, a PromptBatch. Use "
                "PromptDataModule."
            )
        columns = {name: column.flatten() for name, column in rows.columns.items()}
        mask = rows.loss_mask.flatten()
        log_probs = -carry["losses"][: len(mask)]
        losses, clipped = self.policy_loss(
            log_probs, columns[OLD_LOG_PROBS].to(log_probs), columns[ADVANTAGES].to(log_probs)
        )
        sampled = (mask != 0).to(log_probs)
        tokens = sampled.sum()
        ends = columns[ENDS].sum()
        metrics = {name: (column.sum(), ends) for name, column in columns.items() if name not in PER_TOKEN}
        now = log_probs.detach()
        each = {"entropy": -now, "clipped": clipped, "drift": divergence(columns[OLD_LOG_PROBS].to(now), now)}
        if REFERENCE in results:
            theirs = -results[REFERENCE]["losses"]
            places = rows.places
            apart = divergence(log_probs, (theirs[: len(mask)] if places is None else theirs[places]).to(log_probs))
            losses = losses + self.policy_loss.kl * apart
            each["kl"] = apart.detach()
        metrics |= {name: ((values * sampled).sum(), tokens) for name, values in each.items()}
        return Loss(masked_sum(losses, mask), metrics=metrics)

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        """Return what the tokens of answers count in all."""
        return batch.columns[COUNTS].sum()


class GRPOModule(GRPO[GPTConfig], GPTModule):
    """Trains a GPT on rewards; see :class:`GRPO`.

    Args:
        config: the policy; see :class:`~megalight.models.gpt.module.GPTModule`.
        others, options: those of :class:`GRPO`.
    """

    def __init__(self, config: GPTConfig | str | None = None, *others: Any, **options: Any) -> None:
        super().__init__(config, *others, **options)
        if self.config.num_depths:
            raise ConfigurationError("mtp is set: a policy predicts one token at a time. Set config.mtp to null.")

    def alone(self, weights: str | os.PathLike[str]) -> GPTModule:
        """Return a GPT in a folder."""
        return GPTModule(weights=weights)

    def dropout_of(self, config: GPTConfig) -> Mapping[str, float]:
        """Return ``config.dropout`` where it is not 0."""
        return {name: p for name, p in vars(config.dropout).items() if p}

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the reference policy, if there is one; a teacher is refused."""
        if self.distiller is not None:
            raise ConfigurationError("GRPOModule has rewards and no teacher; remove the callback Distillation.")
        return super().frozen_models()


class HFGRPOModule(GRPO[HFConfig], HFCausalLM):
    """Trains any causal language model of ``transformers`` on rewards; see :class:`GRPO`.

    Its layers use the attention interface of ``transformers``, by which answers are packed and keys are kept.

    Args:
        config: the policy; see :class:`~megalight.models.hf_causal_lm.HFCausalLM`.
        others, options: those of :class:`GRPO`.
    """

    def __init__(self, config: HFConfig | None = None, *others: Any, **options: Any) -> None:
        super().__init__(config, *others, **options)

    def alone(self, weights: str | os.PathLike[str]) -> HFCausalLM:
        """Return a model of ``transformers`` in a folder."""
        return HFCausalLM(weights=weights)

    def dropout_of(self, config: HFConfig) -> Mapping[str, float]:
        """Return what the configuration calls dropout and is not 0."""
        values = vars(config.read.get_text_config())
        return {name: p for name, p in values.items() if ("drop" in name) and isinstance(p, float) and p}


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
        loss: says what a token counts.
        scale: see :func:`~megalight.rl.loss.group_advantages`.
        longest: tokens that the model reads at most. A row has no more.

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
            sampled = slice(at + size - len(new), at + size)
            mask[row, sampled], columns[COUNTS][row, sampled] = share, count
            columns[OLD_LOG_PROBS][row, sampled] = torch.tensor(answer.completion.log_probs, dtype=dtype)
            columns[ADVANTAGES][row, sampled] = advantages[place]
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
