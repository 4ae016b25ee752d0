"""GPT as a LightningModule."""

from __future__ import annotations

import os

from torch import Tensor, nn

from megalight.models.family.module import IGNORED, FamilyModule, pack
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.flops import flops_per_token
from megalight.models.gpt.model import Later
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

    With multi-token prediction, depth ``k`` adds its mean cross entropy to the objective, times ``mtp.loss_scale``
    divided by the number of depths.

    Logs, besides those of :class:`~megalight.models.module.MegalightModule`:
        train_mtp_<k>_loss: the mean cross entropy of depth ``k`` of multi-token prediction, in nats.
        train_mtp_<k>: what it adds to the objective.
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

    def context_share(self, batch: TokenBatch, rank: int, size: int) -> TokenBatch:
        """Return share ``rank`` of ``size`` of every sequence, with the later tokens of multi-token prediction."""
        return batch.context_share(rank, size, self.token_multiple, ahead=self.config.num_depths)

    def forward_step(self, model: nn.Module, batch: TokenBatch, carry: Carry | None = None) -> Carry:
        """From tokens ``[b, s]`` or the carry's ``hidden [T, h]`` to ``hidden``; last chunk: to ``losses [T]``.

        Multi-token prediction adds an entry ``mtp_<k>`` for each depth: hidden states, or losses.
        """
        # Sequence parallelism gives each rank an equal share of the tokens.
        sequences = batch.sequences.pad_to(self.token_multiple)

        def labels_of(one: TokenBatch) -> Tensor:
            # The op skips labels that are ignored, which saves their part of the projection's work.
            return pack(one.labels.masked_fill(one.loss_mask == 0, IGNORED), sequences, IGNORED)

        later: list[Later] = []
        # only training reads depths: validation reports the loss of the model that will be used
        if model.training and any(getattr(model, part, None) is not None for part in ("mtp", "head")):
            shifted = [batch.shifted(depth) for depth in self._depths]
            later = [Later(pack(one.tokens, sequences, 0), labels_of(one)) for one in shifted]
        output = model(
            pack(batch.tokens, sequences, 0),
            sequences,
            labels=labels_of(batch),
            hidden=None if carry is None else carry["hidden"],
            later=later,
            depths=[] if carry is None else [carry[f"mtp_{k}"] for k in self._depths if f"mtp_{k}" in carry],
        )
        depths = {f"mtp_{depth}": tensor for depth, tensor in enumerate(output.depths, 1)}
        return depths | ({"hidden": output.hidden} if output.losses is None else {"losses": output.losses})

    def loss_step(self, carry: Carry, batch: TokenBatch) -> Loss:
        """Return the cross entropy in nats, weighted by the loss mask and summed over the tokens."""
        auxiliary, metrics = {}, {}
        for depth in self._depths:
            name = f"mtp_{depth}"
            if (losses := carry.get(name)) is None:  # the model is not in training
                break
            mask = batch.shifted(depth).loss_mask
            total = _masked_sum(losses, mask)
            auxiliary[name] = total * (self._depth_scale / len(self._depths))
            metrics[f"{name}_loss"] = total.detach(), mask.sum()
        return Loss(_masked_sum(carry["losses"], batch.loss_mask), auxiliary, metrics)

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the loss mask."""
        return batch.loss_mask.sum()

    def auxiliary_counts(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return the sum of the loss mask of each depth of multi-token prediction, which has fewer tokens."""
        return {f"mtp_{depth}": batch.shifted(depth).loss_mask.sum() for depth in self._depths}

    @property
    def _depths(self) -> range:
        return range(1, self.config.num_depths + 1)

    @property
    def _depth_scale(self) -> float:
        return 0.0 if self.config.mtp is None else self.config.mtp.loss_scale

    def output_step(self, carry: Carry, batch: TokenBatch) -> Tensor:
        """Return the cross entropy of each label in nats, ``[b, s]``. It is 0 if the loss mask is 0."""
        return carry["losses"][: batch.labels.numel()].view(batch.labels.shape)

    def flops_per_token(self, sequence_length: int) -> float:
        """Return operations of forward and backward; see :func:`megalight.models.gpt.flops.flops_per_token`."""
        return float(flops_per_token(self.config, sequence_length))


def _masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the losses ``[T]`` of the tokens of a mask. Losses behind it belong to padding."""
    weights = mask.reshape(-1)
    return (losses[: weights.numel()] * weights).sum()
