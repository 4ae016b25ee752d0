"""A causal language model of ``transformers`` as a LightningModule."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.batches import IGNORED, masked_sum, pack
from megalight.models.family.module import FamilyModule
from megalight.models.hf_causal_lm.config import HFConfig
from megalight.models.hf_causal_lm.model import HFModel
from megalight.models.loading import Keys
from megalight.models.module import Carry
from megalight.optim import AdamConfig
from megalight.parallel.apply import whole_tokens
from megalight.types import Loss, TokenBatch, WithResults
from megalight.types.batch import opened


class HFCausalLM(FamilyModule[HFConfig]):
    """Trains any causal language model of ``transformers`` to predict the next token, with ``TokenBatch``.

    Its modules keep the code that they have there. It splits by what the model declares, and runs our attention where
    it uses the attention interface; the callback ``FusedOps`` gives it further ops.

    Args:
        config: the model, by the content of its ``config.json``; None: that of ``weights``.
        weights: a folder of ``transformers``, a name of the Hugging Face Hub, or a checkpoint to start from. None:
            random initial weights.
        Others are those of :class:`~megalight.models.family.module.FamilyModule`.
    """

    family = "hf"

    def __init__(
        self,
        config: HFConfig | None = None,
        optimizer: AdamConfig | None = None,
        seed: int = 1234,
        weights: str | os.PathLike[str] | None = None,
        weights_keys: Keys = "strict",
    ) -> None:
        super().__init__(config, optimizer, seed, weights, weights_keys)

    def forward_step(self, model: nn.Module, batch: TokenBatch | WithResults, carry: Carry | None = None) -> Carry:
        """From tokens ``[b, s]`` to ``losses [T]``."""
        rows, _ = opened(batch)
        sequences = rows.sequences.pad_to(self.token_multiple)
        if sequences.uniform is not None and sequences.uniform[1] % self.token_multiple:
            sequences = replace(sequences, uniform=None)  # as one row, whose length is a multiple
        labels = rows.labels.masked_fill(rows.loss_mask == 0, IGNORED)
        output = model(pack(rows.tokens, sequences, 0), sequences, labels=pack(labels, sequences, IGNORED))
        return {"losses": output.losses}

    def loss_step(self, carry: Carry, batch: TokenBatch) -> Loss:
        """Return the cross entropy in nats, weighted by the loss mask and summed over the tokens."""
        return Loss(masked_sum(carry["losses"], batch.loss_mask))

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the loss mask."""
        return batch.loss_mask.sum()

    @torch.no_grad()
    def generate(self, ids: Tensor, **options: Any) -> Any:
        """Generate with ``transformers``' own ``generate``. The ranks that hold the model call it together.

        Args:
            ids: ``[B, S]``.
            options: those of ``generate``.

        Raises:
            ConfigurationError: the model is not built, or this process holds a stage of a pipeline only.
        """
        if not isinstance(self.model, HFModel):
            raise ConfigurationError("the model is not built; call configure_model() before generate().")
        if self._trainer is not None and getattr(self._trainer.strategy, "holds_part", False):
            raise ConfigurationError(
                "generate() runs the whole model, and this process holds some of its layers. Load a checkpoint into a "
                "new module with megalight.strategies.load_weights(module, checkpoint)."
            )
        training = self.model.training
        self.model.eval()
        try:
            with whole_tokens(self.model):
                return self.model.net.generate(ids, **options)
        finally:
            self.model.train(training)
