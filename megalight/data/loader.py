"""Batches of tokens: how samples become one, and a loader that Lightning can resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from megalight.data.gpt import Sample
from megalight.errors import ConfigurationError
from megalight.types import TokenBatch

log = logging.getLogger(__name__)


def collate(samples: Sequence[Sample]) -> TokenBatch:
    """Samples as the rows of a batch."""
    documents = tuple(sample.document_lengths for sample in samples if sample.document_lengths is not None)
    return TokenBatch(
        torch.from_numpy(np.stack([sample.tokens for sample in samples])),
        torch.from_numpy(np.stack([sample.labels for sample in samples])),
        torch.from_numpy(np.stack([sample.loss_mask for sample in samples])),
        documents or None,
    )


class TokenLoader(DataLoader[Any]):
    """A ``DataLoader`` whose place in the data follows from the trainer's step count, asked when iteration begins.

    What it puts into a checkpoint is therefore no position, only the facts that make the step count mean the same
    position again.

    Attributes:
        facts: ``global_batch_size`` and ``accumulate_grad_batches``, which a resumed run must keep, and ``order``, the
            hash of the order of samples.
    """

    facts: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The facts."""
        return dict(self.facts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the facts of the run that wrote a checkpoint with this one's.

        Raises:
            ConfigurationError: the batch size or the accumulation differ, so that the position is not known.
        """
        for key in ("global_batch_size", "accumulate_grad_batches"):
            if state.get(key) != self.facts.get(key):
                raise ConfigurationError(
                    f"{key} is {self.facts.get(key)}; the checkpoint was written with {state.get(key)}, and its place "
                    f"in the data is counted in such batches. Resume with {key}={state.get(key)}, or begin a new run "
                    "from the checkpoint's weights."
                )
        if state.get("order") != self.facts.get("order"):
            log.warning(
                "the order of the training data differs from the checkpoint's (other data, seed, sequence length, or "
                "passes over the data): samples may repeat"
            )
