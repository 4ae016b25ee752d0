"""The teacher of a student: its frozen model, the hidden states that are compared, and the loss."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, nearest
from megalight.models.batches import masked_sum
from megalight.models.distillation.loss import DistillationLoss, LayerPair
from megalight.models.distillation.teacher import HEAD, OutputLayer, Teacher
from megalight.models.family import family
from megalight.models.gpt.config import GPTConfig
from megalight.models.hidden import KEPT, places_of
from megalight.models.stored import open_model
from megalight.models.transforms import HiddenStateComparison
from megalight.nn import DistillationTarget, StateComparison
from megalight.nn.canonical import parts
from megalight.ops.divergence import Projection
from megalight.parallel.frozen_model import FrozenModel, FrozenSubmodule
from megalight.parallel.layout import Layout
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.source import SelectedSource
from megalight.parallel.styles import VocabHeadStyle
from megalight.types import PackedSequences, TokenBatch

TEACHER = "teacher"
"""Name of the teacher among the frozen models of a run, and first part of its canonical names."""

SAVED = "model."
"""What canonical names begin with in the folder of the teacher."""

OUTPUT = "head.output_layer"

LAST = "head.norm"
"""The place of the last hidden states, which a teacher returns in any case."""


@dataclass(frozen=True)
class Distiller:
    """What a student's LightningModule needs of its teacher.

    Args:
        folder: a checkpoint of the teacher, a folder of runs, whose newest checkpoint is taken, or a ``transformers``
            folder.
        loss: the loss.
        layout: the teacher's layout.

    Raises:
        CheckpointError: the folder holds no complete model, or one with adapters.
        ConfigurationError: the teacher is of another family than ``gpt``.
    """

    folder: str | os.PathLike[str]
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    layout: Layout = field(default_factory=Layout)
    teacher: Teacher = field(init=False, compare=False)
    files: Mapping[str, bytes] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Read the teacher's configuration."""
        # Once: a run may still be saving there.
        object.__setattr__(self, "folder", latest_checkpoint(self.folder))
        stored = open_model(self.folder)
        # Models that read images predict tokens too, but no student has images to show them.
        if not isinstance(stored.config, GPTConfig):
            raise ConfigurationError(
                f"the teacher in {self.folder} is a {stored.family.name} model; students learn from models of the "
                "family gpt. Name the folder of one."
            )
        places = dict.fromkeys(place(pair.teacher) for pair in self.loss.pairs)
        teacher = Teacher(stored.family, stored.config, [name for name in places if name != LAST])
        object.__setattr__(self, "teacher", teacher)
        object.__setattr__(self, "files", stored.files)

    def check(self, config: GPTConfig) -> None:
        """Refuse a teacher that does not fit the student.

        Args:
            config: the student.

        Raises:
            ConfigurationError: the vocabularies have different sizes, or a model lacks a place of a pair.
        """
        theirs = self.teacher.config.vocab_size
        if theirs != config.vocab_size:
            raise ConfigurationError(
                f"the teacher in {self.folder} has vocab_size={theirs}, and the student has {config.vocab_size}: their "
                "distributions cannot be compared. Use a teacher with the student's tokenizer and vocab_size."
            )
        if not self.loss.pairs:
            return
        with torch.device("meta"):
            ours, theirs = places_of(family("gpt").model(config)), places_of(self.teacher.build_model())
        for pair in self.loss.pairs:
            check_place(pair.student, ours, "the student")
            check_place(pair.teacher, theirs, f"the teacher in {self.folder}")

    def transform(self, config: GPTConfig) -> HiddenStateComparison | None:
        """Return the change of the student that the loss needs, or None."""
        if not self.loss.pairs and not self.loss.balance:
            return None
        # Without pairs nothing would train a projection.
        wide = self.teacher.config.hidden_size if self.loss.pairs else config.hidden_size
        return HiddenStateComparison(config.hidden_size, wide, config.init.std)

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

    def frozen_models(self) -> dict[str, FrozenModel]:
        """Return the declaration of the teacher for a run, by its name."""
        config, weights = self.teacher.config, open_model(self.folder).weights
        with torch.device("meta"):
            names = [SAVED + part.name for part in parts(self.teacher.build_model())]
        output = "embed.word" if config.tie_embeddings else OUTPUT
        declared = FrozenModel(
            layout=self.layout,
            task=self.teacher,
            source=SelectedSource(weights, {name: name for name in names}),
            for_last_stage=True,
            submodule=FrozenSubmodule(
                build=lambda: OutputLayer(config.hidden_size, config.vocab_size),
                name=HEAD,
                plan=ParallelizePlan({"layer": VocabHeadStyle()}),
                source=SelectedSource(weights, {f"{TEACHER}.{HEAD}.layer.weight": f"{SAVED}{output}.weight"}),
            ),
        )
        return {TEACHER: declared}

    def target(
        self, results: Mapping[str, Tensor], batch: TokenBatch, sequences: PackedSequences, training: bool
    ) -> DistillationTarget:
        """Return what the student's head learns from the teacher's results for a micro-batch.

        Args:
            results: of all tokens of the micro-batch.
            batch: the student's share of it.
            sequences: those of the student, with its padding.
        """
        assert self.teacher.submodule is not None
        layer = self.teacher.submodule.layer
        hidden = share_of(results["hidden"], batch.places, sequences)
        teacher = Projection(hidden, layer.weight, layer.bias, self.teacher.config.logit_softcap)
        # Evaluation reports the student's own loss, which training may leave out.
        return DistillationTarget(teacher, self.loss.divergence, self.loss.temperature, self.loss.own or not training)

    def compared(
        self,
        comparison: StateComparison,
        kept: Mapping[str, Tensor],
        results: Mapping[str, Tensor],
        batch: TokenBatch,
        sequences: PackedSequences,
    ) -> dict[str, Tensor]:
        """Return the losses of pairs of hidden states by name, ``[T]`` each, without their weights.

        Args:
            comparison: the student's part for them.
            kept: the student's states; see :func:`~megalight.models.hidden.keeping`.
            results, batch, sequences: see :meth:`target`.
        """
        found = {}
        for name, pair in self._pairs.items():
            theirs = place(pair.teacher)
            state = results["hidden" if theirs == LAST else KEPT + theirs]
            found[name] = comparison(
                share_of(state, batch.places, sequences), kept[KEPT + place(pair.student)], pair.loss
            )
        return found

    def means(self, comparison: StateComparison, found: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Return what balances the parts; see :meth:`~megalight.models.distillation.loss.DistillationLoss.objective`.

        Args:
            comparison: finds means over the whole micro-batch.
            found: losses ``[T]`` by name.
            mask: the loss mask of this rank's tokens.
        """
        divergence, states, own = self._sums(found, mask)
        rows = [divergence, states, torch.zeros_like(divergence) if own is None else own]
        return comparison.pool.mean(torch.stack(rows))

    def objective(
        self, found: Mapping[str, Tensor], mask: Tensor, training: bool
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return the loss of a micro-batch, and metrics.

        Args:
            found: losses ``[T]`` by name: ``divergences``, those of pairs, and the student's own ``losses``, which may
                be missing in training; and ``means``, if the parts are balanced.
            mask: the loss mask.
        """
        tokens = mask.sum()
        divergence, states, own = self._sums(found, mask)
        named = {"divergence": divergence} | {name: masked_sum(found[name], mask) for name in self._pairs}
        if training and own is not None:
            named["own_loss"] = own
        metrics = {name: (total.detach(), tokens) for name, total in named.items()}
        if not training:
            assert own is not None
            return own, metrics
        return self.loss.objective(divergence, states, own, found.get("means")), metrics

    def _sums(self, found: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        divergence = masked_sum(found["divergences"], mask)
        states = self.loss.states([masked_sum(found[name], mask) for name in self._pairs], divergence)
        return divergence, states, masked_sum(found["losses"], mask) if "losses" in found else None

    @property
    def places(self) -> tuple[str, ...]:
        """The places in the student whose hidden states are compared."""
        return tuple(place(pair.student) for pair in self.loss.pairs)

    @property
    def _pairs(self) -> dict[str, LayerPair]:
        return {f"pair_{number}": pair for number, pair in enumerate(self.loss.pairs)}


def share_of(state: Tensor, places: Tensor | None, sequences: PackedSequences) -> Tensor:
    """Return the rows of a rank's share of the tokens, and padding: ``state [N, ...] -> [T, ...]``.

    Args:
        state: of all tokens of a micro-batch.
        places: see :class:`~megalight.types.TokenBatch`; None: the share is all of them.
        sequences: those of the share, with their padding.
    """
    # Padding of a share takes the row of some token, and its label has no loss.
    if places is not None:
        state = state[places]
    return F.pad(state, (*(0, 0) * (state.dim() - 1), 0, sequences.num_tokens - state.shape[0]))


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


# Megatron's names of hidden states


PARTS = {
    "self_attention": "attention",
    "self_attention.linear_proj": "attention",
    "input_layernorm": "attention_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc2": "mlp",
    "mixer": "mamba",
    "norm": "mamba_norm",
}
"""Megatron's names of parts of a layer -> ours."""


def place(name: str) -> str:
    """Return our name of a place that Megatron names, and other names as they are."""
    if name == "decoder.final_layernorm":
        return "head.norm"
    found = re.fullmatch(r"decoder\.(layers\.\d+)(?:\.(.+))?", name)
    if found is None:
        return name
    layer, part = found.groups()
    return layer if part is None else f"{layer}.{PARTS.get(part, part)}"


def check_place(name: str, known: Collection[str], model: str) -> None:
    """Refuse a place that a model does not have.

    Args:
        model: which model, for the error.

    Raises:
        ConfigurationError: names what it has.
    """
    if place(name) in known:
        return
    layers = sum(other.count(".") == 1 for other in known) - 1
    first = [other for other in known if other.startswith("layers.0")]
    raise ConfigurationError(
        f"{model} has no place {name!r} whose hidden states could be compared."
        + nearest(place(name), known)
        + f" It has {layers} layers, from layers.0 to layers.{layers - 1}; places of the first are {', '.join(first)}, "
        "and head.norm is the final norm."
    )
