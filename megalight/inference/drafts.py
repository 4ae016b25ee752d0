"""Drafts from checkpoints, for generation."""

from __future__ import annotations

import os

from megalight import checkpoint
from megalight.checkpoint.disk.newest import newest_in
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.inference.parallel import ParallelGPT
from megalight.inference.speculative import check_draft
from megalight.models.eagle import DraftModel
from megalight.models.eagle.importing import is_draft
from megalight.models.gpt import GPT
from megalight.models.saved import companions_of, description, saved_model


def load_draft(path: str | os.PathLike[str], base: GPT | ParallelGPT, tokenizer: Tokenizer | None = None) -> DraftModel:
    """Load a draft for a model in memory, on its device and in its dtype. Each rank of a divided base loads it whole.

    Args:
        path: a checkpoint of a draft, or a run's folder (its newest checkpoint).
        base: the model that it serves.
        tokenizer: that of the base.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete.
        ConfigurationError: it holds no draft, or the draft does not fit the base.
        DataError: the draft was trained with another tokenizer.
    """
    if is_draft(path):
        raise ConfigurationError(
            f"{path} is a draft for serving engines; make a checkpoint of it first: megalight convert {path} OUTPUT"
        )
    path = newest_in(path)
    opened = checkpoint.open(path)
    if description(opened)["family"] != "eagle":
        raise ConfigurationError(
            f"{path} holds a {description(opened)['family']} model, and a draft is of the family eagle; train one with "
            "EagleModule."
        )
    theirs = companions_of(path).get(TOKENIZER)
    if tokenizer is not None and theirs is not None:
        found = Tokenizer.from_json(theirs.decode()).identity
        if found != tokenizer.identity:
            raise DataError(
                f"the draft in {path} was trained with another tokenizer than that of its base, so ids do not mean the "
                "same to it; name the draft of this base."
            )
    weight = next(base.parameters(), None)
    dtype, device = (None, None) if weight is None else (weight.dtype, weight.device)
    if isinstance(base, ParallelGPT):
        # A stage may have no weights; the first has the embedding.
        dtype, device = base.agree(dtype), base.device
    draft = saved_model(opened, device or "cpu", dtype).root
    assert isinstance(draft, DraftModel)
    check_draft(base, draft)
    return draft.eval()
