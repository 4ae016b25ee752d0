"""Teachers: the forward pass of one that runs, and the cached logits of one that ran."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.data.cached_outputs import CachedLogits
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.models.batches import masked_sum, pack
from megalight.models.distillation.loss import DistillationLoss
from megalight.models.family import Family
from megalight.models.gpt.config import GPTConfig
from megalight.models.hidden import keeping
from megalight.nn import DistillationTarget, Linear
from megalight.ops.divergence import TOP_KINDS
from megalight.parallel.frozen_model import FrozenModel
from megalight.parallel.pipeline.p2p_communication import Carry
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Boundary
from megalight.types import PackedSequences, TokenBatch, TopTokens

HEAD, WHOLE = "head", "head.whole"


class LastNorm(nn.Module):
    """The end of a teacher: the final norm, without the output layer.

    Attributes:
        whole: takes hidden states of layers, for which a plan may have a rule.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.whole = nn.Identity()

    def forward(self, hidden: Tensor, labels: None = None) -> Tensor:
        """``[T, h] -> [T, h]``."""
        output: Tensor = self.norm(hidden)
        return output


class OutputLayer(nn.Module):
    """The teacher's projection to the vocabulary, ``h -> V``."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.layer = Linear(hidden_size, vocab_size)


class Teacher:
    """The forward pass of a teacher: to the normed hidden states of the real tokens, ``hidden [T, h]``.

    Args:
        known: its family, whose models are ``embed | layers | head``.
        config: its configuration.
        places: modules inside it whose outputs ``[T, h]`` are results, too; see :mod:`megalight.models.hidden`.

    Attributes:
        submodule: its output layer on the ranks of the student's last stage, once the run has built it.
    """

    def __init__(self, known: Family, config: Any, places: Sequence[str] = ()) -> None:
        self.family = known
        # Depths of multi-token prediction say nothing of the next token.
        self.config = replace(config, mtp=None)
        self.places = tuple(places)
        self.token_multiple = 1
        self.submodule: OutputLayer | None = None

    def build_model(self) -> nn.Module:
        """Build the model without its output layer."""
        model = self.family.model(self.config)
        model.head = LastNorm(model.head.norm)  # type: ignore[arg-type]
        return model

    def plan(self, model: nn.Module) -> ParallelizePlan:
        """Return the family's plan; the results are those of all tokens, whoever computed them."""
        return self.family.plan(model) | ParallelizePlan({HEAD: Boundary(leave="join"), WHOLE: Boundary(leave="join")})

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        """See :class:`~megalight.parallel.frozen_model.FrozenTask`. Hidden states of layers travel with the carry."""
        sequences = batch.sequences.pad_to(self.token_multiple)
        hidden = None if carry is None else carry["hidden"]
        with keeping(model, self.places, carry) as kept:
            output = model(pack(batch.tokens, sequences, 0), sequences, hidden=hidden)
        if output.logits is None:
            return {"hidden": output.hidden, **kept}
        found = {"hidden": output.logits, **{name: model.head.whole(state) for name, state in kept.items()}}  # type: ignore[union-attr, operator]
        # The student pads to a multiple of its own.
        return {name: state[: batch.tokens.numel()] for name, state in found.items()}


@dataclass(frozen=True)
class CachedTeacher:
    """What a student's LightningModule needs of a teacher whose logits are cached on disk.

    Batches bring them (:attr:`~megalight.types.TokenBatch.cached_outputs`). Validation reports the student's own loss,
    and the divergence if the folder has validation samples.

    Args:
        folder: what ``megalight cache-logits`` wrote. It is opened when it is first needed.
        loss: the loss.

    Raises:
        ConfigurationError: the loss needs more of the teacher than its most likely tokens.
    """

    folder: str | os.PathLike[str]
    loss: DistillationLoss

    def __post_init__(self) -> None:
        """Check the loss."""
        if self.loss.divergence not in TOP_KINDS:
            raise ConfigurationError(
                f"divergence={self.loss.divergence!r} needs all probabilities of the teacher, and a store holds the "
                f"largest; choose one of {', '.join(TOP_KINDS)}, or give teacher instead of teacher_logits."
            )
        if self.loss.pairs or self.loss.balance:
            raise ConfigurationError(
                "pairs and balance need the teacher's hidden states, and a store holds none; leave them out (scale "
                "weighs the divergence against the own loss), or give teacher instead of teacher_logits."
            )

    @cached_property
    def store(self) -> CachedLogits:
        """The store."""
        return CachedLogits(self.folder)

    def check(self, config: GPTConfig) -> None:
        """Refuse a store that does not fit the student.

        Args:
            config: the student.

        Raises:
            ConfigurationError: the vocabularies have different sizes, or the temperatures differ.
            DataError: the store is not complete.
        """
        meta = self.store.meta
        if meta.vocab_size != config.vocab_size:
            raise ConfigurationError(
                f"the teacher of {self.folder} has vocab_size={meta.vocab_size}, and the student has "
                f"{config.vocab_size}: their distributions cannot be compared. Use a teacher with the student's "
                "tokenizer and vocab_size."
            )
        if meta.temperature != self.loss.temperature:
            raise ConfigurationError(
                f"temperature={self.loss.temperature}, but {self.folder} was written with {meta.temperature}: the "
                "bucket of unlikely tokens has no other. Set this one, or write the store again with --temperature."
            )

    def transform(self, config: GPTConfig) -> None:
        """Return no change of the student."""

    def check_length(self, length: int | None) -> None:
        """Refuse sequences of another length.

        Args:
            length: tokens of a sequence of the data; None: not known.

        Raises:
            DataError: the store was written for another length.
        """
        stored = self.store.meta.sequence_length
        if length is not None and length != stored:
            raise DataError(
                f"data.sequence_length={length}, but {self.folder} was written for {stored}; set this one, or write "
                "the store again with megalight cache-logits."
            )

    def check_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Refuse data of another tokenizer.

        Args:
            files: the files that come with the data. Without a tokenizer there, nothing is known.

        Raises:
            DataError: the tokenizers differ.
        """
        stored = self.store.meta.tokenizer
        if stored is None or TOKENIZER not in files:
            return
        found = Tokenizer.from_json(files[TOKENIZER].decode()).identity
        if found != stored:
            raise DataError(
                f"{self.folder} was written for data of the tokenizer {stored}, but that of the data is {found}: ids "
                "do not mean the same. Use that data, or write the store again with megalight cache-logits."
            )

    def frozen_models(self) -> dict[str, FrozenModel]:
        """Return nothing: no teacher is in memory."""
        return {}

    def target(
        self, results: Mapping[str, Tensor], batch: TokenBatch, sequences: PackedSequences, training: bool
    ) -> DistillationTarget | None:
        """Return what the student's head learns from the teacher's tokens; None without any.

        Args:
            results: of frozen models; not used.
            batch: the student's share of a micro-batch.
            sequences: those of the student, with its padding.
            training: whether the own loss may be left out.
        """
        if batch.cached_outputs is None:
            return None
        assert isinstance(batch.cached_outputs, TopTokens)

        def packed(rows: Tensor) -> Tensor:
            rows = rows.flatten(0, 1)
            # Padding has no label, so what the teacher says there does not count.
            return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, sequences.num_tokens - len(rows)))

        cached_outputs = batch.cached_outputs.each(packed)
        return DistillationTarget(
            cached_outputs, self.loss.divergence, self.loss.temperature, self.loss.own or not training
        )

    def objective(
        self, found: Mapping[str, Tensor], mask: Tensor, training: bool
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return the loss of a micro-batch, and metrics; see :meth:`.Distiller.objective`."""
        own = masked_sum(found["losses"], mask) if "losses" in found else None
        if "divergences" not in found:
            assert own is not None
            return own, {}
        divergence, tokens = masked_sum(found["divergences"], mask), mask.sum()
        metrics = {"divergence": (divergence.detach(), tokens)}
        if not training:
            assert own is not None
            return own, metrics
        if own is not None:
            metrics["own_loss"] = own.detach(), tokens
        return self.loss.objective(divergence, torch.zeros_like(divergence), own, None), metrics

    @property
    def places(self) -> tuple[str, ...]:
        """No hidden states of the student are compared."""
        return ()
