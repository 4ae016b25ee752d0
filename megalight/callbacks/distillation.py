"""Training a student beside a frozen teacher."""

from __future__ import annotations

import os

import lightning.pytorch as pl

from megalight.errors import ConfigurationError
from megalight.models.distillation import DistillationLoss, Distiller, Layout
from megalight.models.gpt.module import GPTModule


class Distillation(pl.Callback):
    """Trains the model to predict what a teacher predicts (https://arxiv.org/abs/1503.02531).

    The teacher has its own configuration, weights and layout. It is in no checkpoint.

    Args:
        teacher: a checkpoint, or a ``transformers`` folder. Its vocabulary is that of the student.
        divergence: ``forward_kl``, ``reverse_kl``, ``jensen_shannon`` or ``cross_entropy``.
        temperature: divides the logits of both models.
        scale: multiplies the divergence.
        own_loss: add the student's own loss to the objective.
        tensor_parallel: the teacher's degree, over the same ranks.
        pipeline_parallel: the teacher's degree.
        sequence_parallel: the teacher's; see :class:`~megalight.strategies.MegatronStrategy`.
        pipeline_layout: the layers of each of the teacher's stages.

    Logs:
        train_divergence: mean divergence over the tokens, without ``scale``.
        train_own_loss: the student's own mean loss, with ``own_loss``. ``train_loss`` is the objective.
        val_loss: the student's own loss, also without ``own_loss``.
        val_divergence: mean divergence over the validation data.

    Raises:
        ConfigurationError: a value is out of range; before processes start: the vocabularies differ, or the module is
            no :class:`~megalight.models.gpt.module.GPTModule`; in set-up: there are two of these callbacks.
        CheckpointError: the folder holds no complete model.
        DataError: before processes start: the data was made by another tokenizer than the teacher's, or its sequences
            are too long for the teacher.
    """

    def __init__(
        self,
        teacher: str | os.PathLike[str],
        divergence: str = "forward_kl",
        temperature: float = 1.0,
        scale: float = 1.0,
        own_loss: bool = False,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        sequence_parallel: bool = False,
        pipeline_layout: str | None = None,
    ) -> None:
        loss = DistillationLoss(divergence=divergence, temperature=temperature, scale=scale, own=own_loss)
        layout = Layout(tensor_parallel, pipeline_parallel, sequence_parallel, pipeline_layout)
        self.distiller = Distiller(teacher, loss, layout)

    def attach(self, module: pl.LightningModule) -> None:
        """Give the module its teacher. Called before processes start."""
        if not isinstance(module, GPTModule):
            raise ConfigurationError(
                f"{type(module).__name__} is no GPTModule, whose loss can compare its logits with a teacher's. Derive "
                "from GPTModule, or write a loss of your own beside a frozen model (docs/frozen-models.md)."
            )
        self.distiller.check(module.config.vocab_size)
        module.distiller = self.distiller

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Do the same in each process."""
        if sum(isinstance(callback, Distillation) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ConfigurationError(
                "the Trainer has more than one Distillation, and a student has one teacher; keep one."
            )
        self.attach(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the teacher away: a later Trainer without this callback trains the module alone."""
        assert isinstance(pl_module, GPTModule)
        pl_module.distiller = None
