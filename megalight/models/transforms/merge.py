"""Merge adapters: turn a checkpoint with adapters into a checkpoint of a plain model."""

from __future__ import annotations

import os

from megalight import checkpoint
from megalight.checkpoint import views_of_parameters
from megalight.errors import CheckpointError
from megalight.models.family import family
from megalight.models.saved import BASE, description, saved_config, saved_model, serving, unread_of
from megalight.models.transforms import describe
from megalight.models.transforms.lora import LoRA, merge
from megalight.models.transforms.saved import chosen_adapter

RUN = ("optimizer", "callbacks", "lr_schedulers")
"""Entries of a checkpoint about the run that trained the adapters. The result does not have them."""


def merge_checkpoint(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    adapter: str | None = None,
) -> int:
    """Write a checkpoint's model with one of its adapters added to the weights of its layers.

    The result holds only weights. Use it to generate, to evaluate, or to fine-tune again.

    Args:
        path: the checkpoint.
        output: the folder to write.
        base: the initial weights of the training, for a checkpoint that holds only adapters.
        adapter: the adapter's name; the result has no other. None: the only one.

    Returns:
        the number of linear layers that had the adapter.

    Raises:
        CheckpointError: the checkpoint is incomplete or has no adapters, not this one, or several and none is named;
            or ``base`` is missing.
    """
    opened = checkpoint.open(path)
    described = description(opened)
    transforms = serving(described)
    # Other transforms that change the model stay part of it.
    others = [transform for transform in transforms if not isinstance(transform, LoRA)]
    if len(others) == len(transforms):
        raise CheckpointError(f"checkpoint {opened.path} has no adapters: there is nothing to merge.")
    # Tokenizer and templates go with the weights, whatever became of the adapters.
    files = {name: opened.file(name) for name in opened.files}
    if base is not None:  # checkpoints of adapters alone leave out what no run reads
        files |= unread_of(base, family(described["family"]), saved_config(described, opened.path))
    model = saved_model(opened, base=base, adapter=chosen_adapter(opened, adapter).adapter)
    count = merge(model.root)
    # The optimizer's state is that of the adapters, which are gone.
    common = {name: value for name, value in opened.common.items() if name not in RUN}
    common["model"] = {**described, "transforms": describe(others), BASE: True}
    checkpoint.save(
        output,
        views_of_parameters(model.tensors().items(), model.specs, model.mesh),
        common=common,
        files=files,
    )
    return count
