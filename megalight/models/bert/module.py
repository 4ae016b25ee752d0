"""BERT as a LightningModule."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.data.bert.batch import BertBatch
from megalight.models.bert.config import BertConfig
from megalight.models.bert.flops import flops_per_token
from megalight.models.family.module import IGNORED, FamilyModule, pack
from megalight.models.module import Carry
from megalight.optim import AdamConfig
from megalight.types import Loss


class BertModule(FamilyModule[BertConfig]):
    """Training of a BERT on masked words and the order of segments, on :class:`~megalight.data.bert.batch.BertBatch`.

    The objective is the mean cross entropy of the masked tokens of the global batch (``loss``) plus, where the model
    has the head, the mean cross entropy of its samples' order (``order_loss``; ALBERT,
    https://arxiv.org/abs/1909.11942). Neither depends on how the batch is cut into micro-batches.

    Args:
        config: the model, or the name of a preset (``bert_base``; see :mod:`megalight.models.bert.presets`);
            None: that of ``weights``.
        optimizer: Adam's settings, parameter groups and learning-rate schedule.
        seed: of the initial weights.
        weights: a checkpoint, or a folder of ``transformers``, to start from; None: weights are drawn.
    """

    family = "bert"
    varying_carry = True  # samples keep their lengths, so no two micro-batches need be alike

    def __init__(
        self,
        config: BertConfig | str | None = None,
        optimizer: AdamConfig | None = None,
        seed: int = 1234,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(config, optimizer, seed, weights)

    def forward_step(self, model: nn.Module, batch: BertBatch, carry: Carry | None = None) -> Carry:
        """Tokens, or the carry's ``hidden [T, h]``, to ``hidden``; on the last chunk ``losses``, ``order [n, 2]``."""
        sequences = batch.sequences.pad_to(self.token_multiple)
        output = model(
            pack(batch.tokens, sequences, 0),
            sequences,
            pack(batch.token_types, sequences, 0),
            labels=pack(batch.labels, sequences, IGNORED),
            hidden=None if carry is None else carry["hidden"],
            rows=batch.rows,
        )
        found = {"hidden": output.hidden, "losses": output.losses, "order": output.order}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def loss_step(self, carry: Carry, batch: BertBatch) -> Loss:
        """Cross entropy in nats: summed over masked tokens, and a mean over samples for their order.

        Means of micro-batches are averaged, so a micro-batch of fewer samples than others counts by its ``weight``.
        """
        total = carry["losses"].sum()
        if "order" not in carry:
            return Loss(total)
        logits = carry["order"][: len(batch)]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        order = F.cross_entropy(logits, batch.order, ignore_index=IGNORED, reduction="sum")
        asked = (batch.order != IGNORED).sum()
        right = (logits.argmax(-1) == batch.order).sum()
        return Loss(
            total,
            auxiliary={"order_loss": order * (batch.weight / len(batch))},
            metrics={"order_loss": (order.detach(), asked), "order_accuracy": (right, asked)},
        )

    def loss_tokens(self, batch: BertBatch) -> Tensor:
        """Masked tokens."""
        return (batch.labels != IGNORED).sum()

    def output_step(self, carry: Carry, batch: BertBatch) -> Tensor:
        """``[M]`` cross entropy of the masked tokens, in their order, in nats."""
        losses = carry["losses"]
        return losses if batch.rows is not None else losses[: batch.labels.numel()][batch.labels != IGNORED]

    def flops_per_token(self, sequence_length: int) -> float:
        """Forward and backward, by the rule of :func:`megalight.models.bert.flops.flops_per_token`."""
        return float(flops_per_token(self.config, sequence_length))
