"""GPT as a LightningModule."""

from __future__ import annotations

import os

from torch import Tensor, nn

from megalight.models.family.module import IGNORED, FamilyModule, pack
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.flops import flops_per_token
from megalight.models.module import Carry
from megalight.optim import AdamConfig
from megalight.types import Loss, TokenBatch


class GPTModule(FamilyModule[GPTConfig]):
    """Trains a GPT to predict the next token, with :class:`~megalight.types.TokenBatch`.

    Args:
        config: the model, or the name of a preset (``llama3_8b``; see :mod:`megalight.models.gpt.presets`);
            None: the configuration in ``weights``.
        optimizer: settings of Adam, parameter groups and learning-rate schedule.
        seed: seed of the initial weights.
        weights: a checkpoint or a ``transformers`` folder to start from. None: random initial weights.
    """

    family = "gpt"

    def __init__(
        self,
        config: GPTConfig | str | None = None,
        optimizer: AdamConfig | None = None,
        seed: int = 1234,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(config, optimizer, seed, weights)

    def forward_step(self, model: nn.Module, batch: TokenBatch, carry: Carry | None = None) -> Carry:
        """From tokens ``[b, s]`` or the carry's ``hidden [T, h]`` to ``hidden``; last chunk: to ``losses [T]``."""
        # Sequence parallelism gives each rank an equal share of the tokens.
        sequences = batch.sequences.pad_to(self.token_multiple)
        # The op skips labels that are ignored, which saves their part of the projection's work.
        labels = batch.labels.masked_fill(batch.loss_mask == 0, IGNORED)
        output = model(
            pack(batch.tokens, sequences, 0),
            sequences,
            labels=pack(labels, sequences, IGNORED),
            hidden=None if carry is None else carry["hidden"],
        )
        return {"hidden": output.hidden} if output.losses is None else {"losses": output.losses}

    def loss_step(self, carry: Carry, batch: TokenBatch) -> Loss:
        """Return the cross entropy in nats, weighted by the loss mask and summed over the tokens."""
        mask = batch.loss_mask.reshape(-1)
        # losses past the mask belong to padding, which forward_step added
        # Weighted after the op, as masks may hold other values than 0 and 1.
        return Loss(sum=(carry["losses"][: mask.numel()] * mask).sum())

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the loss mask."""
        return batch.loss_mask.sum()

    def output_step(self, carry: Carry, batch: TokenBatch) -> Tensor:
        """Return the cross entropy of each label in nats, ``[b, s]``. It is 0 if the loss mask is 0."""
        return carry["losses"][: batch.labels.numel()].view(batch.labels.shape)

    def flops_per_token(self, sequence_length: int) -> float:
        """Return operations of forward and backward; see :func:`megalight.models.gpt.flops.flops_per_token`."""
        return float(flops_per_token(self.config, sequence_length))
