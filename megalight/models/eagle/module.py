"""Training of an EAGLE-3 draft beside its frozen base."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from megalight.checkpoint.sources import LenientSource, OverlaySource
from megalight.errors import ConfigurationError, integer
from megalight.models.batches import IGNORED, pack
from megalight.models.distillation import share_of
from megalight.models.eagle.architecture import read_architecture, read_vocabulary
from megalight.models.eagle.base import BASE, Base, BaseModel, serve
from megalight.models.eagle.config import EagleConfig
from megalight.models.family.module import FamilyModule
from megalight.models.loading import Keys
from megalight.models.module import Carry
from megalight.nn import DistillationTarget
from megalight.ops.divergence import Projection
from megalight.optim import AdamConfig
from megalight.parallel.frozen_model import FrozenModel
from megalight.parallel.layout import Layout
from megalight.parallel.source import Source
from megalight.parallel.step import share_of_batch
from megalight.types import Loss, TokenBatch, WithResults
from megalight.types.batch import opened


class EagleModule(FamilyModule[EagleConfig]):
    """Trains a draft model to predict what its base predicts, several tokens ahead, with ``TokenBatch``.

    The base is frozen, in a layout of its own, and in no checkpoint. Step ``n`` adds ``decay^n`` times its mean loss:
    the cross entropy with the base's distribution, over the tokens that the draft knows.

    Args:
        base: a checkpoint of a GPT, a folder of runs, whose newest one is taken, or a ``transformers`` folder. Or a
            folder of ``megalight hidden-states``: then no base runs.
        config: the draft; None: as :class:`~megalight.models.eagle.EagleConfig` derives it from the base.
        architecture: a JSON file in place of ``config``; see :func:`~megalight.models.eagle.read_architecture`.
        draft_vocabulary: a file with the ids that the draft predicts, in place of ``config.draft_ids``; see
            :func:`~megalight.models.eagle.read_vocabulary`.
        weights: a checkpoint of a draft to start from, or a run's folder. None: random initial weights.
        steps: how many tokens ahead the draft is trained.
        decay: see above.
        base_layout: the base's layout, over the same ranks; None: each rank runs a whole base.
        Others are those of :class:`~megalight.models.family.module.FamilyModule`.

    Logs, besides those of :class:`~megalight.models.module.MegalightModule`, in training and validation:
        train_step_<n>_loss: the mean loss of step ``n``.
        train_step_<n>_accuracy: how often the draft's first choice is the base's. Both choose among the tokens that the
            draft knows, so with ``draft_ids`` it is above the share of the base's own choices that the draft meets.

    Raises:
        ConfigurationError: the draft does not fit the base, or a value is out of range.
        CheckpointError: the folder holds no complete model.
        DataError: before processes start: the data was made by another tokenizer than the base's, or hidden states on
            disk are incomplete; in set-up: they are of other samples.
    """

    family = "eagle"

    def __init__(
        self,
        base: str | os.PathLike[str],
        config: EagleConfig | None = None,
        optimizer: AdamConfig | None = None,
        seed: int = 1234,
        weights: str | os.PathLike[str] | None = None,
        weights_keys: Keys = "strict",
        steps: int = 4,
        decay: float = 0.9,
        base_layout: Layout | None = None,
        architecture: str | os.PathLike[str] | None = None,
        draft_vocabulary: str | os.PathLike[str] | None = None,
    ) -> None:
        integer("steps", steps)
        if not 0 < decay <= 1:
            raise ConfigurationError(f"decay={decay} must be above 0 and at most 1; 0.9 is usual.")
        self.base_model = BaseModel(base, base_layout or Layout())
        if architecture is not None and config is not None:
            raise ConfigurationError("architecture describes the whole draft; give it, or config.")
        ids = () if draft_vocabulary is None else read_vocabulary(draft_vocabulary)
        if architecture is not None:
            config = read_architecture(architecture, ids)
        elif config is None and weights is None:
            config = EagleConfig(draft_ids=ids)
        elif ids:
            if config is None or config.draft_ids:
                where = "weights" if config is None else "config"
                raise ConfigurationError(
                    f"draft_vocabulary and {where} both say which ids the draft predicts; keep one."
                )
            config = replace(config, draft_ids=ids)
        super().__init__(config, optimizer, seed, weights, weights_keys)
        # Also of the configuration in `weights`, whose draft may have served another base.
        self.config = self.config.for_base(self.base_model.config)
        self.steps = steps
        self.decay = decay
        self.base: Base = self.base_model.task(self.config.auxiliary_layers)

    def initial_weights(self) -> Source | None:
        """Return the folder ``weights`` as a source; an output layer of the base is read from the base."""
        source = super().initial_weights()
        if self.config.head == "own":
            return source
        head = self.base_model.head_source()
        return (
            LenientSource(head, str(self.base_model.folder), say=False)
            if source is None
            else OverlaySource(source, head)
        )

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return the base."""
        return {BASE: self.base_model.frozen(self.base, self.config.draft_ids)}

    def setup(self, stage: str) -> None:
        """Check the data, and let its batches bring hidden states that lie on disk."""
        super().setup(stage)
        if self.base_model.states is not None:
            data = getattr(self.trainer, "datamodule", None)
            serve(self.base_model.states, data, self.config.auxiliary_layers, stage)

    def teardown(self, stage: str) -> None:
        """Leave the data as it was."""
        super().teardown(stage)
        data = getattr(self.trainer, "datamodule", None)
        if data is not None and self.base_model.states is not None and hasattr(data, "cached_outputs"):
            data.cached_outputs = None

    def check_data(self, datamodule: Any) -> None:
        """Refuse data that does not fit the draft, or came from another tokenizer than the base's."""
        super().check_data(datamodule)
        self.base_model.check_tokenizer(getattr(datamodule, "checkpoint_files", dict)())

    def context_share(self, batch: Any, rank: int, size: int) -> Any:
        """Take a share of each sequence, and of the tokens that the steps read and predict."""
        return share_of_batch(type(self).__name__, batch, rank, size, self.token_multiple, self.steps)

    def forward_step(self, model: nn.Module, batch: WithResults, carry: Carry | None = None) -> Carry:
        """From the base's results to ``losses_<n> [T]`` and ``hits_<n> [T]`` of each step."""
        rows, results = opened(batch)
        ends = self.base.submodule
        assert ends is not None
        sequences = rows.sequences.pad_to(self.token_multiple)
        # Of all tokens, also where this rank holds a share: the next token may lie in another one.
        hidden = results[BASE]["hidden"]
        # Once for all steps: each step learns from the next of its rows.
        top = ends.head.top(hidden, normed=True)

        def share(state: Tensor) -> Tensor:
            return share_of(state, rows.places, sequences)

        embedded, labels, targets = [], [], []
        for ahead in range(1, self.steps + 1):
            later = rows.shifted(ahead)
            embedded.append(ends.embed(pack(later.tokens, sequences, 0)))
            labels.append(pack(later.labels.masked_fill(later.loss_mask == 0, IGNORED), sequences, IGNORED))
            # Rows that come round from the beginning lie behind the end of a sequence, where nothing counts.
            teacher = Projection(
                share(hidden.roll(-ahead, 0)), ends.head.output_layer.weight, None, self.base.config.logit_softcap
            )
            targets.append(DistillationTarget(teacher, "cross_entropy", own=False))
        found: Carry = {}
        auxiliary = share(results[BASE]["auxiliary"])
        for step, draft in enumerate(model(auxiliary, embedded, sequences, labels, targets)):
            found[f"losses_{step}"] = draft.losses
            found[f"hits_{step}"] = (draft.top == share(top.roll(-step - 1, 0))).to(draft.losses)
        return found

    def loss_step(self, carry: Carry, batch: WithResults) -> Loss:
        """Return the sum of the first step; that of each further one is an auxiliary loss."""
        rows, _ = opened(batch)
        sums, metrics = [], {}
        for step in range(self.steps):
            mask = rows.shifted(step + 1).loss_mask.reshape(-1)
            losses, hits = ((carry[f"{name}_{step}"][: len(mask)] * mask).sum() for name in ("losses", "hits"))
            sums.append(losses)
            metrics[f"step_{step}_loss"] = losses.detach(), mask.sum()
            metrics[f"step_{step}_accuracy"] = hits, mask.sum()
        further = {f"step_{step}": sums[step] * self.decay**step for step in range(1, self.steps)}
        return Loss(sums[0], further, metrics)

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        """Return how many tokens the first step predicts."""
        return batch.shifted(1).loss_mask.sum()

    def aux_loss_counts(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return how many tokens each further step predicts: those at the end of a sequence have no later ones."""
        return {f"step_{step}": batch.shifted(step + 1).loss_mask.sum() for step in range(1, self.steps)}

    def output_step(self, carry: Carry, batch: Any) -> Tensor:
        """Return the loss of the first step at each place, ``[b, s]``."""
        rows, _ = opened(batch)
        return carry["losses_0"][: rows.labels.numel()].view(rows.labels.shape)
