"""BERT as a LightningModule."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.data.bert.batch import BertBatch
from megalight.errors import ConfigurationError
from megalight.models.batches import IGNORED, pack
from megalight.models.bert.config import BertConfig, flops_per_token
from megalight.models.family.module import FamilyModule
from megalight.models.loading import Keys
from megalight.models.module import Carry
from megalight.optim import AdamConfig
from megalight.types import Loss


class BertModule(FamilyModule[BertConfig]):
    """Trains a BERT on masked words and the order of segments, with :class:`~megalight.data.bert.batch.BertBatch`.

    The objective is the mean cross entropy of the masked tokens of the global batch (``loss``). If the model has the
    head for it, the mean cross entropy of the order of segments is added (``order_loss``; ALBERT,
    https://arxiv.org/abs/1909.11942). Both are the same for any division of the batch into micro-batches.

    Args:
        config: the model, or the name of a preset (``bert_base``; see :mod:`megalight.models.bert.presets`);
            None: the configuration in ``weights``.
        Others are those of :class:`~megalight.models.family.module.FamilyModule`.
    """

    family = "bert"
    varying_carry = True  # samples are not padded to one length, so shapes differ between micro-batches

    def __init__(
        self,
        config: BertConfig | str | None = None,
        optimizer: AdamConfig | None = None,
        seed: int = 1234,
        weights: str | os.PathLike[str] | None = None,
        weights_keys: Keys = "strict",
    ) -> None:
        super().__init__(config, optimizer, seed, weights, weights_keys)
        if self.config.head != "pretraining":
            raise ConfigurationError(
                f"head is {self.config.head!r}: such a model predicts nothing that BertModule could train. Give a "
                "config with head='pretraining', or use megalight.models.bert.Bert in a module of your own."
            )

    def forward_step(self, model: nn.Module, batch: BertBatch, carry: Carry | None = None) -> Carry:
        """From tokens or the carry's ``hidden [T, h]`` to ``hidden``; last chunk: to ``losses``, ``order [n, 2]``."""
        # Sequence parallelism gives each rank an equal share of the tokens.
        sequences = batch.sequences.pad_to(self.token_multiple)
        output = model(
            pack(batch.tokens, sequences, 0),
            sequences,
            pack(batch.token_types, sequences, 0),
            labels=pack(batch.labels, sequences, IGNORED),
            hidden=None if carry is None else carry["hidden"],
            # All masked tokens are known to the data, so the head sees no others.
            rows=batch.rows,
        )
        found = {"hidden": output.hidden, "losses": output.losses, "order": output.order}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def loss_step(self, carry: Carry, batch: BertBatch) -> Loss:
        """Return cross entropy in nats: the sum over masked tokens, and for the order the sum over samples."""
        total = carry["losses"].sum()
        if "order" not in carry:
            return Loss(total)
        # Behind them is the row of the padding's sequence.
        logits = carry["order"][: len(batch)]
        # At least float32: the loss of few classes is formed without the fused op that widens by itself.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # A sum, and a count beside it: the mean is over the samples of the whole global batch.
        order = F.cross_entropy(logits, batch.order, ignore_index=IGNORED, reduction="sum")
        asked = (batch.order != IGNORED).sum()
        right = (logits.argmax(-1) == batch.order).sum()
        return Loss(
            total,
            aux_losses={"order_loss": order},
            metrics={"order_loss": (order.detach(), asked), "order_accuracy": (right, asked)},
        )

    def loss_tokens(self, batch: BertBatch) -> Tensor:
        """Count the masked tokens."""
        return (batch.labels != IGNORED).sum()

    def aux_loss_counts(self, batch: BertBatch) -> dict[str, Tensor]:
        """Count the samples whose order is asked for."""
        return {"order_loss": (batch.order != IGNORED).sum()}

    def output_step(self, carry: Carry, batch: BertBatch) -> Tensor:
        """Return the cross entropy of the masked tokens in nats, ``[M]``, in their order."""
        losses = carry["losses"]
        return losses if batch.rows is not None else losses[: batch.labels.numel()][batch.labels != IGNORED]

    def flops_per_token(self, sequence_length: int) -> float:
        """Return operations of forward and backward; see :func:`megalight.models.bert.config.flops_per_token`."""
        return float(flops_per_token(self.config, sequence_length))
