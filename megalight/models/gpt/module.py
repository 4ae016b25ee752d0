"""GPT as a LightningModule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.batches import IGNORED, masked_sum, pack, skips
from megalight.models.distillation import TEACHER, CachedTeacher, Distiller
from megalight.models.family.module import FamilyModule
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.flops import flops_per_token, weights_of_losses
from megalight.models.gpt.model import MultiTokenTarget
from megalight.models.hidden import keeping
from megalight.models.loading import Keys
from megalight.models.module import Carry
from megalight.nn.moe.router import counts_of
from megalight.ops.row_indexing import put_rows
from megalight.optim import AdamConfig
from megalight.parallel.frozen_model import FrozenModel
from megalight.parallel.step import share_of_batch
from megalight.types import Loss, TokenBatch, WithResults
from megalight.types.batch import opened


class GPTModule(FamilyModule[GPTConfig]):
    """Trains a GPT to predict the next token, with :class:`~megalight.types.TokenBatch`.

    Args:
        config: the model, or the name of a preset (``llama3_8b``; see :mod:`megalight.models.gpt.presets`);
            None: the configuration in ``weights``.
        Others are those of :class:`~megalight.models.family.module.FamilyModule`.

    With multi-token prediction, depth ``k`` adds its mean cross entropy to the objective, times ``mtp.loss_scale``
    divided by the number of depths.

    Where batches say which tokens count in the loss (:meth:`~megalight.types.TokenBatch.with_rows`; those of
    fine-tuning do), the others are skipped behind the last mixer: in the rest of the last layer, and in the head.

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
        weights_keys: Keys = "strict",
    ) -> None:
        super().__init__(config, optimizer, seed, weights, weights_keys)

        self.distiller: Distiller | CachedTeacher | None = None
        # Of all micro-batches so far, on the host: how many tokens there were, and how many of them were skipped.
        self._tokens, self._skipped = 0, 0

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the teacher, if there is one."""
        return {} if self.distiller is None else self.distiller.frozen_models()

    def check_model(self, model: nn.Module) -> None:
        """Refuse also a projection to the teacher's width that adapters have frozen."""
        super().check_model(model)
        projection = getattr(getattr(model, "distillation", None), "projection", None)
        if isinstance(projection, Tensor) and not projection.requires_grad:
            raise ConfigurationError(
                "adapters have frozen the projection from the student's hidden states to the teacher's width. List the "
                "callback Distillation after Adapters, which freezes what is there before it."
            )

    def check_data(self, datamodule: Any) -> None:
        """Refuse data that does not fit the model or its teacher, or came from another tokenizer than the teacher's."""
        super().check_data(datamodule)
        if self.distiller is not None:
            self.distiller.check_length(getattr(datamodule, "sequence_length", None))
            self.distiller.check_tokenizer(getattr(datamodule, "checkpoint_files", dict)())

    def context_share(self, batch: TokenBatch, rank: int, size: int) -> TokenBatch:
        """Return share ``rank`` of ``size`` of every sequence, with the later tokens of multi-token prediction."""
        # A batch of the user's own need not know of later tokens without them.
        ahead = self.config.num_depths
        share: TokenBatch = share_of_batch(type(self).__name__, batch, rank, size, self.token_multiple, ahead)
        return share

    def forward_step(self, model: nn.Module, batch: TokenBatch | WithResults, carry: Carry | None = None) -> Carry:
        """From tokens ``[b, s]`` or the carry's ``hidden [T, h]`` to ``hidden``; last chunk: to ``losses [T]``.

        Multi-token prediction adds an entry ``mtp_<k>`` for each depth: hidden states, or losses. With a teacher, the
        last chunk returns ``divergences [T]``, too, and losses of pairs of hidden states; it leaves out losses that are
        not part of the objective.
        """
        rows, results = opened(batch)
        # Sequence parallelism gives each rank an equal share of the tokens.
        sequences = rows.sequences.pad_to(self.token_multiple)

        def labels_of(one: TokenBatch) -> Tensor:
            # The op skips labels that are ignored, which saves their part of the projection's work.
            return pack(one.labels.masked_fill(one.loss_mask == 0, IGNORED), sequences, IGNORED)

        later: list[MultiTokenTarget] = []
        # only training reads depths: validation reports the loss of the model that will be used
        if model.training and any(getattr(model, part, None) is not None for part in ("mtp", "head")):
            shifted = [rows.shifted(depth) for depth in self._depths]
            later = [MultiTokenTarget(pack(one.tokens, sequences, 0), labels_of(one)) for one in shifted]
        target, distiller = None, self.distiller
        ends = getattr(model, "head", None) is not None
        if distiller is not None and ends:
            target = distiller.target(results.get(TEACHER, {}), rows, sequences, model.training)
        counted = rows.rows if self._skips(rows) else None
        if getattr(model, "embed", None) is not None:
            self._tokens += rows.tokens.numel()
            self._skipped += 0 if counted is None else rows.tokens.numel() - len(counted)
        with keeping(model, () if distiller is None else distiller.places, carry) as kept:
            output = model(
                pack(rows.tokens, sequences, 0),
                sequences,
                labels=labels_of(rows),
                hidden=None if carry is None else carry["hidden"],
                rows=counted,
                later=later,
                depths=[] if carry is None else [carry[f"mtp_{k}"] for k in self._depths if f"mtp_{k}" in carry],
                target=target,
            )
        depths = {f"mtp_{depth}": tensor for depth, tensor in enumerate(output.depths, 1)}
        losses = output.losses
        if losses is not None and counted is not None:
            losses = put_rows(losses, counted, sequences.num_tokens)
        found = {"hidden": output.hidden, "losses": losses, "divergences": output.divergences}
        answer = depths | {name: tensor for name, tensor in found.items() if tensor is not None}
        if not isinstance(distiller, Distiller) or not ends:
            return answer | kept
        if distiller.loss.pairs:
            answer |= distiller.compared(model.distillation, kept, results[TEACHER], rows, sequences)  # type: ignore[arg-type]
        if distiller.loss.balance and model.training:
            answer["means"] = distiller.means(model.distillation, answer, rows.loss_mask)  # type: ignore[arg-type]
        return answer

    def _skips(self, batch: TokenBatch) -> bool:
        """Return whether tokens without a loss are skipped. A teacher and multi-token prediction read all of them."""
        return self.distiller is None and not self._depths and skips(batch, self.token_multiple)

    def loss_step(self, carry: Carry, batch: TokenBatch | WithResults) -> Loss:
        """Return the cross entropy in nats, weighted by the loss mask and summed over the tokens.

        With a teacher: the objective of :meth:`megalight.models.distillation.Distiller.objective`.
        """
        rows, _ = opened(batch)
        aux_losses: dict[str, Tensor] = {}
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        for depth in self._depths:
            name = f"mtp_{depth}"
            if (losses := carry.get(name)) is None:  # the model is not in training
                break
            mask = rows.shifted(depth).loss_mask
            lost = masked_sum(losses, mask)
            aux_losses[name] = lost * (self._depth_scale / len(self._depths))
            metrics[f"{name}_loss"] = lost.detach(), mask.sum()
        if self.distiller is not None:
            total, more = self.distiller.objective(carry, rows.loss_mask, self.training)
            metrics |= more
        else:
            total = masked_sum(carry["losses"], rows.loss_mask)
        return Loss(total, aux_losses, metrics)

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the loss mask."""
        return batch.loss_mask.sum()

    def aux_loss_counts(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return the sum of the loss mask of each depth of multi-token prediction, and counts of routers' losses."""
        depths = {f"mtp_{depth}": batch.shifted(depth).loss_mask.sum() for depth in self._depths}
        moe = self.config.moe
        return depths if moe is None else depths | counts_of(moe.balance, batch.sequences)

    @property
    def _depths(self) -> range:
        return range(1, self.config.num_depths + 1)

    @property
    def _depth_scale(self) -> float:
        return 0.0 if self.config.mtp is None else self.config.mtp.loss_scale

    def flops_per_token(self, sequence_length: int) -> float:
        """Return operations of forward and backward; see :func:`megalight.models.gpt.flops.flops_per_token`.

        What tokens without a loss skip is left out, by their share in the batches so far on this rank.
        """
        spared = self._skipped / max(1, self._tokens) * 6.0 * weights_of_losses(self.config)
        return float(flops_per_token(self.config, sequence_length)) - spared
