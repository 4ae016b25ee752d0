"""Training a student beside a frozen teacher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as pl

from megalight.callbacks.cuda_graph import WHOLE, CUDAGraph
from megalight.data.module import TokenDataModule
from megalight.errors import ConfigurationError
from megalight.models.distillation import CachedTeacher, DistillationLoss, Distiller, LayerPair, read_modelopt
from megalight.models.gpt.module import GPTModule
from megalight.parallel.layout import Layout


class Distillation(pl.Callback):
    """Trains the model to predict what a teacher predicts (https://arxiv.org/abs/1503.02531).

    The teacher has its own configuration, weights and layout. It is in no checkpoint.

    Args:
        teacher: a checkpoint, a folder of runs, whose newest checkpoint is taken, or a ``transformers`` folder. Its
            vocabulary is that of the student.
        divergence: ``forward_kl``, ``reverse_kl``, ``jensen_shannon`` or ``cross_entropy``.
        temperature: divides the logits of both models.
        scale: multiplies the divergence.
        own_loss: add the student's own loss to the objective.
        pairs: losses between hidden states of both models. If these have different widths, a projection is trained in
            the student. It is saved with the student's checkpoints, and left out where they are used.
        balance: scale the parts to one magnitude, as ModelOpt does: the losses of pairs, together, to that of the
            divergence; and with ``own_loss`` the two, together, to ``scale`` times that of the student's own loss. The
            factors are ratios of sums over one micro-batch, on all ranks that share its sequences, and have no
            gradient. So the result depends on the size of micro-batches, and not on the layout.
        modelopt_config: YAML file of ModelOpt's settings, in place of the arguments from ``divergence`` to ``balance``.
        teacher_layout: the teacher's layout, over the same ranks; None: each rank runs a whole teacher.
        teacher_logits: folder of ``megalight cache-logits``, in place of ``teacher``: the teacher's most likely tokens
            for each training sample. No teacher is in memory. ``divergence`` is ``forward_kl`` or ``cross_entropy``,
            over these tokens and one bucket for all others, at the temperature of the folder.

    Logs:
        train_divergence: mean divergence over the tokens, without ``scale``.
        train_own_loss: the student's own mean loss, with ``own_loss``. ``train_loss`` is the objective.
        train_pair_<n>: mean loss of pair ``n``, without its weight; also ``val_pair_<n>``.
        val_loss: the student's own loss, also without ``own_loss``.
        val_divergence: mean divergence over the validation data; with ``teacher_logits``, if the folder has validation
            samples.

    Raises:
        ConfigurationError: a value is out of range. Before processes start: the vocabularies differ, a model has no
            module of a pair's name, or the module is no :class:`~megalight.models.gpt.module.GPTModule`. In ``setup``:
            there are two of these callbacks, recompute or CUDA graphs hide hidden states of pairs, or the data has no
            numbered samples for ``teacher_logits``.
        CheckpointError: the folder holds no complete model.
        DataError: before processes start: the data was made by another tokenizer than the teacher's, or its sequences
            are too long for the teacher, or ``teacher_logits`` is not complete; in set-up: it was written for other
            samples.
    """

    def __init__(
        self,
        teacher: str | os.PathLike[str] | None = None,
        divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon", "cross_entropy"] = "forward_kl",
        temperature: float = 1.0,
        scale: float = 1.0,
        own_loss: bool = False,
        pairs: Sequence[LayerPair] = (),
        balance: bool = False,
        modelopt_config: str | os.PathLike[str] | None = None,
        teacher_layout: Layout | None = None,
        teacher_logits: str | os.PathLike[str] | None = None,
    ) -> None:
        loss = DistillationLoss(
            divergence=divergence,
            temperature=temperature,
            scale=scale,
            own=own_loss,
            pairs=tuple(pairs),
            balance=balance,
        )
        if modelopt_config is not None:
            if loss != DistillationLoss():
                raise ConfigurationError(
                    "modelopt_config describes the whole loss; leave divergence, temperature, scale, own_loss, pairs "
                    "and balance out, or leave modelopt_config out."
                )
            loss = read_modelopt(modelopt_config)
        self.distiller: Distiller | CachedTeacher
        if teacher is not None and teacher_logits is None:
            self.distiller = Distiller(teacher, loss, teacher_layout or Layout())
        elif teacher_logits is not None and teacher is None:
            if teacher_layout is not None:
                raise ConfigurationError(
                    "teacher_layout describes a teacher in memory, and with teacher_logits there is none; leave it out."
                )
            self.distiller = CachedTeacher(teacher_logits, loss)
        else:
            raise ConfigurationError(
                "give either teacher, a model that runs beside the student, or teacher_logits, a folder that "
                f"megalight cache-logits wrote; {'neither' if teacher is None else 'both'} was given."
            )

    def attach(self, module: pl.LightningModule) -> None:
        """Give the module its teacher. Called before processes start."""
        if not isinstance(module, GPTModule):
            raise ConfigurationError(
                f"{type(module).__name__} is no GPTModule, whose loss can compare its logits with a teacher's. Derive "
                "from GPTModule, or write a loss of your own beside a frozen model (docs/frozen-models.md)."
            )
        self.distiller.check(module.config)
        module.distiller = self.distiller
        # Called before processes start, and again in each of them.
        transform = self.distiller.transform(module.config)
        if transform is not None and transform not in module.transforms:
            module.transforms.append(transform)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Do the same in each process."""
        if sum(isinstance(callback, Distillation) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ConfigurationError(
                "the Trainer has more than one Distillation, and a student has one teacher; keep one."
            )
        if self.distiller.loss.pairs:
            _check_hidden(trainer)
        self.attach(pl_module)
        if isinstance(self.distiller, CachedTeacher) and stage == "fit":
            _serve(self.distiller, getattr(trainer, "datamodule", None))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the teacher away: a later Trainer without this callback trains the module alone."""
        assert isinstance(pl_module, GPTModule)
        pl_module.distiller = None
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, TokenDataModule):
            data.cached_outputs = None


def _serve(recorded: CachedTeacher, data: object) -> None:
    """Let batches of training bring what the teacher predicts.

    Raises:
        ConfigurationError: the data has no numbered samples.
        DataError: the store was written for other samples.
    """
    if not isinstance(data, TokenDataModule):
        raise ConfigurationError(
            f"teacher_logits={recorded.folder} is read by numbers of samples, which {type(data).__name__} does not "
            "have; train with a data module such as GPTDataModule or SFTDataModule."
        )
    recorded.store.check(*data.training_samples())
    if data.validates and recorded.store.has("validation") and (validation := data.validation_samples()) is not None:
        recorded.store.check(*validation, "validation")
    data.cached_outputs = recorded.store


def _check_hidden(trainer: pl.Trainer) -> None:
    """Refuse what runs layers in a way that hides the outputs of single modules.

    Raises:
        ConfigurationError: names the setting.
    """
    recompute = getattr(trainer.strategy, "recompute", None)
    if recompute is not None and recompute.method == "uniform" and recompute.num_layers != 1:
        raise ConfigurationError(
            f"recompute.num_layers={recompute.num_layers} runs layers as groups, whose hidden states pairs cannot "
            "read; choose recompute.num_layers=1."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, CUDAGraph) and callback.scope not in WHOLE:
            raise ConfigurationError(
                f"CUDAGraph(scope={callback.scope!r}) replays layers without the hooks by which pairs read their "
                "hidden states; choose scope='iteration', or leave it out."
            )
