"""GPT as a LightningModule."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megalight.errors import CheckpointError, DataError
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.flops import flops_per_token
from megalight.models.gpt.model import GPT
from megalight.models.gpt.presets import preset
from megalight.models.module import Carry, MegalightModule
from megalight.optim import AdamConfig
from megalight.types import Loss, PackedSequences, TokenBatch

IGNORED = -100
"""Label of a token without a loss."""


class GPTModule(MegalightModule):
    """Next-token training of a GPT on :class:`~megalight.types.TokenBatch`.

    Args:
        config: the model, or the name of a preset (``llama3_8b``; see :mod:`megalight.models.gpt.presets`).
        optimizer: Adam's settings, parameter groups and learning-rate schedule.
        seed: of the initial weights.
    """

    def __init__(self, config: GPTConfig | str, optimizer: AdamConfig | None = None, seed: int = 1234) -> None:
        super().__init__(seed)
        self.config = preset(config) if isinstance(config, str) else config
        self.optimizer = optimizer or AdamConfig()

    def setup(self, stage: str) -> None:
        """Check the data before anything is built."""
        self.check_data(getattr(self.trainer, "datamodule", None))

    def check_data(self, datamodule: Any) -> None:
        """Refuse data that the model cannot take. ``MegatronStrategy`` asks before it starts processes.

        Raises:
            DataError: sequences too long for the model, or a tokenizer with more tokens than its vocabulary.
        """
        length = getattr(datamodule, "sequence_length", None)
        if length is not None and length > self.config.max_sequence_length:
            raise DataError(
                f"data.sequence_length={length} is longer than the model's "
                f"max_sequence_length={self.config.max_sequence_length}; lower the one or raise the other."
            )
        vocabulary = getattr(datamodule, "vocab_size", None)
        if vocabulary is not None and vocabulary > self.config.vocab_size:
            raise DataError(
                f"the data's tokenizer has {vocabulary} tokens, but the model's vocab_size is "
                f"{self.config.vocab_size}; raise vocab_size, or prepare the data with a smaller tokenizer."
            )

    def build_model(self) -> GPT:
        """The whole model on one device."""
        return GPT(self.config)

    def forward_step(self, model: nn.Module, batch: TokenBatch, carry: Carry | None = None) -> Carry:
        """``[b, s]`` tokens (or the carry's ``hidden [T, h]``) to ``hidden``, or on the last chunk ``losses [T]``."""
        sequences = batch.sequences.pad_to(self.token_multiple)
        labels = batch.labels.masked_fill(batch.loss_mask == 0, IGNORED)
        output = model(
            pack(batch.tokens, sequences, 0),
            sequences,
            labels=pack(labels, sequences, IGNORED),
            hidden=None if carry is None else carry["hidden"],
        )
        return {"hidden": output.hidden} if output.losses is None else {"losses": output.losses}

    def loss_step(self, carry: Carry, batch: TokenBatch) -> Loss:
        """Cross entropy in nats, summed over the tokens that the loss mask lets count."""
        mask = batch.loss_mask.reshape(-1)
        return Loss(sum=(carry["losses"][: mask.numel()] * mask).sum())

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        """Tokens that the loss mask lets count."""
        return batch.loss_mask.sum()

    def predict_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """``[b, s]`` cross entropy of each label, in nats; 0 where the loss mask is 0."""
        assert self.model is not None
        losses = self.forward_step(self.model, batch)["losses"]
        return losses[: batch.labels.numel()].view(batch.labels.shape)

    def configure_optimizers(self) -> Any:
        """Adam and its schedule, stepped once per optimizer step.

        A schedule that must know the length of the run takes the trainer's ``max_steps``, or its own ``steps``. (Not
        ``estimated_stepping_batches``: it would start the data before a checkpoint says where to.)
        """
        optimizer, scheduler = self.optimizer.build(self.named_parameters(), self.trainer.max_steps)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def flops_per_token(self, sequence_length: int) -> float:
        """Forward and backward, by the rule of :func:`megalight.models.gpt.flops.flops_per_token`."""
        return float(flops_per_token(self.config, sequence_length))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write what the model is, so that a checkpoint can be used without its recipe."""
        checkpoint["model"] = {"family": "gpt", "config": self.config.to_dict()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the checkpoint is of this model."""
        self.check_checkpoint(checkpoint)

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model. ``MegatronStrategy`` asks before it starts processes.

        Raises:
            CheckpointError: names the settings that differ.
        """
        found = checkpoint.get("model", {}).get("config")
        if found is None:
            raise CheckpointError("the checkpoint does not say which model it holds; it was not written by GPTModule.")
        differences = sorted(compare(self.config.to_dict(), found))
        if differences:
            raise CheckpointError(
                f"the checkpoint is of another model: {'; '.join(differences)}. Use the configuration it was trained "
                "with (megalight inspect shows it), or another checkpoint."
            )


def pack(rows: Tensor, sequences: PackedSequences, filler: int) -> Tensor:
    """``[b, s]`` as ``[T]``, with ``filler`` in the dummy sequence."""
    flat = rows.reshape(-1)
    return F.pad(flat, (0, sequences.num_padding), value=filler) if sequences.num_padding else flat


UNBINDING = {"dropout", "backends", "init"}
"""Settings that may change between the runs of one model."""


def compare(ours: dict[str, Any], theirs: dict[str, Any], path: str = "") -> list[str]:
    """Settings that bind the weights and differ, as ``name: ours here, theirs in the checkpoint``."""
    found = []
    for name in sorted(set(ours) | set(theirs)):
        if not path and name in UNBINDING:
            continue
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            found += compare(mine, other, f"{path}{name}.")
        elif mine != other:
            found.append(f"{path}{name} is {mine} here and {other} in the checkpoint")
    return found
