"""Distillation: a model learns the distribution of a frozen teacher (https://arxiv.org/abs/1503.02531).

The teacher runs in its own layout and returns its last hidden states ``[T, h]``, not its logits ``[T, V]``. Its output
layer lies beside the student's, split alike, and the loss applies both to a chunk of tokens at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.models.family import Family
from megalight.models.packing import pack
from megalight.models.stored import open_model
from megalight.nn import Lesson, Linear
from megalight.nn.canonical import parts
from megalight.ops.divergence import KINDS, Projection
from megalight.parallel.frozen import Beside, FrozenModel
from megalight.parallel.options import ParallelOptions
from megalight.parallel.pipeline.carry import Carry
from megalight.parallel.plan import Plan
from megalight.parallel.source import Chosen
from megalight.parallel.styles import Boundary, VocabHead
from megalight.types import PackedSequences

TEACHER = "teacher"
"""Name of the teacher among the frozen models of a run, and first part of its canonical names."""

SAVED = "model."
"""What canonical names begin with in the folder of the teacher."""

HEAD, OUTPUT = "head", "head.output_layer"


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """The loss of a student.

    Attributes:
        divergence: ``forward_kl``, ``reverse_kl``, ``jensen_shannon`` or ``cross_entropy``; see
            :mod:`megalight.ops.divergence.kinds`.
        temperature: divides the logits of both models. The loss is not multiplied by its square.
        scale: multiplies the divergence.
        own: whether the student's own loss is part of the objective.

    Raises:
        ConfigurationError: a value is unknown or out of range.
    """

    divergence: str = "forward_kl"
    temperature: float = 1.0
    scale: float = 1.0
    own: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if self.divergence not in KINDS:
            raise ConfigurationError(f"divergence={self.divergence!r} is not one of {', '.join(KINDS)}; use one.")
        for name in ("temperature", "scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name}={getattr(self, name)} must be positive and finite; 1 is usual.")


class LastNorm(nn.Module):
    """The end of a teacher: the final norm, without the output layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

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

    Attributes:
        beside: its output layer on the ranks of the student's last stage, once the run has built it.
    """

    def __init__(self, known: Family, config: Any) -> None:
        self.family = known
        # Depths of multi-token prediction say nothing of the next token.
        self.config = replace(config, mtp=None)
        self.token_multiple = 1
        self.beside: OutputLayer | None = None

    def build_model(self) -> nn.Module:
        """Build the model without its output layer."""
        model = self.family.model(self.config)
        model.head = LastNorm(model.head.norm)  # type: ignore[arg-type]
        return model

    def plan(self, model: nn.Module) -> Plan:
        """Return the family's plan; the results are those of all tokens, whoever computed them."""
        return self.family.plan(model) | Plan({HEAD: Boundary(leave="join")})

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        """See :class:`~megalight.parallel.frozen.FrozenTask`."""
        sequences = batch.sequences.pad_to(self.token_multiple)
        hidden = None if carry is None else carry["hidden"]
        output = model(pack(batch.tokens, sequences, 0), sequences, hidden=hidden)
        if output.logits is None:
            return {"hidden": output.hidden}
        # The student pads to a multiple of its own.
        return {"hidden": output.logits[: batch.tokens.numel()]}


@dataclass(frozen=True)
class Layout:
    """The layout of a teacher; see :class:`~megalight.parallel.options.ParallelOptions`."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_layout: str | None = None


@dataclass(frozen=True)
class Distiller:
    """What a student's LightningModule needs of its teacher.

    Args:
        folder: a checkpoint of the teacher, or a ``transformers`` folder.
        loss: the loss.
        layout: the teacher's layout.

    Raises:
        CheckpointError: the folder holds no complete model, or one with adapters.
        ConfigurationError: the teacher has no output layer to learn from.
    """

    folder: str | os.PathLike[str]
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    layout: Layout = field(default_factory=Layout)
    teacher: Teacher = field(init=False, compare=False)
    files: Mapping[str, bytes] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Read the teacher's configuration."""
        stored = open_model(self.folder)
        if not stored.family.generates:
            raise ConfigurationError(
                f"the teacher in {self.folder} is a {stored.family.name} model, which does not predict next tokens; "
                "give a language model such as a GPT."
            )
        object.__setattr__(self, "teacher", Teacher(stored.family, stored.config))
        object.__setattr__(self, "files", stored.files)

    def check(self, vocab_size: int) -> None:
        """Refuse a teacher that does not fit the student.

        Raises:
            ConfigurationError: the vocabularies have different sizes.
        """
        theirs = self.teacher.config.vocab_size
        if theirs != vocab_size:
            raise ConfigurationError(
                f"the teacher in {self.folder} has vocab_size={theirs}, and the student has {vocab_size}: their "
                "distributions cannot be compared. Use a teacher with the student's tokenizer and vocab_size."
            )

    def check_length(self, length: int | None) -> None:
        """Refuse sequences that are too long for the teacher.

        Args:
            length: tokens of a sequence of the data; None: not known.

        Raises:
            DataError: the teacher's ``max_sequence_length`` is smaller.
        """
        longest = self.teacher.config.max_sequence_length
        if length is not None and length > longest:
            raise DataError(
                f"data.sequence_length={length} is longer than max_sequence_length={longest} of the teacher in "
                f"{self.folder}; lower it, or take another teacher."
            )

    def check_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """See :func:`check_tokenizer`."""
        check_tokenizer(f"the teacher in {self.folder}", self.files, files)

    def frozen(self) -> FrozenModel:
        """Return the declaration of the teacher for a run."""
        config, weights = self.teacher.config, open_model(self.folder).weights
        with torch.device("meta"):
            names = [SAVED + part.name for part in parts(self.teacher.build_model())]
        output = "embed.word" if config.tie_embeddings else OUTPUT
        return FrozenModel(
            task=self.teacher,
            tensor_parallel=self.layout.tensor_parallel,
            pipeline_parallel=self.layout.pipeline_parallel,
            options=ParallelOptions(
                sequence_parallel=self.layout.sequence_parallel, pipeline_layout=self.layout.pipeline_layout
            ),
            source=Chosen(weights, {name: name for name in names}),
            for_last_stage=True,
            beside=Beside(
                build=lambda: OutputLayer(config.hidden_size, config.vocab_size),
                name=HEAD,
                plan=Plan({"layer": VocabHead()}),
                source=Chosen(weights, {f"{TEACHER}.{HEAD}.layer.weight": f"{SAVED}{output}.weight"}),
            ),
        )

    def lesson(
        self, results: Mapping[str, Tensor], places: Tensor | None, sequences: PackedSequences, training: bool
    ) -> Lesson:
        """Return what the student's head learns from the teacher's results for a micro-batch.

        Args:
            results: of all tokens of the micro-batch.
            places: ``[T]``, the places of the student's share of the tokens among them; None: it has all.
            sequences: those of the student, with its padding.
        """
        assert self.teacher.beside is not None
        hidden, layer = results["hidden"], self.teacher.beside.layer
        # Padding of a share takes the row of some token, and its label has no loss.
        if places is not None:
            hidden = hidden[places]
        hidden = F.pad(hidden, (0, 0, 0, sequences.num_tokens - hidden.shape[0]))
        teacher = Projection(hidden, layer.weight, layer.bias, self.teacher.config.logit_softcap)
        # Evaluation reports the student's own loss, which training may leave out.
        return Lesson(teacher, self.loss.divergence, self.loss.temperature, self.loss.own or not training)

    def objective(
        self, divergence: Tensor, own: Tensor | None, tokens: Tensor, training: bool
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return the loss of a micro-batch, and metrics.

        Args:
            divergence: the sum over its tokens.
            own: the student's own loss, likewise; None in training without it.
            tokens: how many tokens count.
        """
        metrics = {"divergence": (divergence.detach(), tokens)}
        if own is None:
            return divergence * self.loss.scale, metrics
        if not training:
            return own, metrics
        return own + divergence * self.loss.scale, metrics | {"own_loss": (own.detach(), tokens)}


def check_tokenizer(model: str, files: Mapping[str, bytes], data: Mapping[str, bytes]) -> None:
    """Refuse data whose token ids mean something else to a frozen model.

    Args:
        model: which model, for the error.
        files: the files that come with it. Without a tokenizer there, or with the data, nothing is known.
        data: the files that come with the data.

    Raises:
        DataError: the tokenizers differ.
    """
    both = [found[TOKENIZER] for found in (files, data) if TOKENIZER in found]
    identities = {Tokenizer.from_json(text.decode()).identity for text in both}
    if len(identities) > 1:
        raise DataError(
            f"{model} was trained with another tokenizer than that of the data, so ids do not mean the same to it. "
            "Prepare the data with its tokenizer.json, or take another model."
        )
