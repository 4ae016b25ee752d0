"""Adapters in checkpoints: which there are, a run that starts with them, several in one checkpoint, and merging."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megalight import checkpoint
from megalight.checkpoint import Checkpoint, views_of_parameters
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.sources import FullPrecision, UnionSource
from megalight.checkpoint.view import View, views_of_source
from megalight.errors import CheckpointError, ConfigurationError, nearest
from megalight.models.config import compare
from megalight.models.family import family
from megalight.models.loading import (
    BASE,
    PREFIX,
    companions_of,
    description,
    holds_base,
    saved_config,
    saved_model,
    serving,
    unread_of,
    without_training_parts,
)
from megalight.models.transforms import describe
from megalight.models.transforms.lora import LoRA, merge
from megalight.nn.adapter import parse_tensor_name, tensor_name
from megalight.parallel.source import SelectedSource, Source


def adapters_of(opened: Checkpoint) -> list[LoRA]:
    """Return the adapters of a checkpoint, in the order in which they were added; the last one was trained last.

    Raises:
        CheckpointError: it has none.
    """
    found = [transform for transform in serving(description(opened)) if isinstance(transform, LoRA)]
    if not found:
        raise CheckpointError(f"checkpoint {opened.path} has no adapters.")
    return found


def check_base(opened: Checkpoint, family: str, config: Mapping[str, Any]) -> None:
    """Check that a checkpoint's adapters are of the model with this configuration, as plain values.

    Raises:
        CheckpointError: they are of another one. The message names what differs.
    """
    described = description(opened)
    differences = compare(config, described["config"], "the checkpoint")
    if described["family"] != family or differences:
        what = "; ".join(differences) or f"family {described['family']}, not {family}"
        raise CheckpointError(
            f"the adapters in {opened.path} are of another base: {what}. Name the base's own adapters."
        )


def chosen_adapter(opened: Checkpoint, adapter: str | None) -> LoRA:
    """Return the adapter with that name; None: the only one.

    Raises:
        CheckpointError: there is no such adapter, or there are several and none is named.
    """
    found = {lora.adapter: lora for lora in adapters_of(opened)}
    if adapter is None and len(found) == 1:
        return next(iter(found.values()))
    if adapter is None:
        raise CheckpointError(
            f"checkpoint {opened.path} has the adapters {', '.join(found)}; name one by adapter (--adapter)."
        )
    if adapter not in found:
        raise CheckpointError(
            f"checkpoint {opened.path} has no adapter {adapter!r}.{nearest(adapter, found)} It has {', '.join(found)}."
        )
    return found[adapter]


def tensors_of(opened: Checkpoint, adapter: str | None = None) -> list[str]:
    """Return the names of the tensors of all adapters of a checkpoint, or of one."""
    found = {name: parse_tensor_name(name) for name in opened.tensors if name.startswith(PREFIX)}
    return [name for name, parsed in found.items() if parsed is not None and adapter in (None, parsed[2])]


def with_adapters(base: Source | None, path: str | os.PathLike[str]) -> Source:
    """Return a source of initial weights with the adapters of a checkpoint.

    Args:
        base: the weights without adapters. None: those of the checkpoint.
        path: the checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or ``base`` is None and it holds only adapters.
    """
    opened = checkpoint.open(path)
    if base is not None:
        return UnionSource(base, SelectedSource(FullPrecision(opened), {name: name for name in tensors_of(opened)}))
    if not holds_base(opened.common):
        raise CheckpointError(f"checkpoint {opened.path} holds only adapters; give the module their base (weights).")
    return without_training_parts(FullPrecision(opened), description(opened))


def join_adapters(
    paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], names: Sequence[str] | None = None
) -> list[str]:
    """Write the adapters of several checkpoints as one checkpoint of adapters alone.

    Args:
        paths: the checkpoints, with adapters of one base.
        output: the checkpoint to write.
        names: a new name for the adapter of each checkpoint, which must then be its only one. None: their own names.

    Returns:
        the names of the adapters.

    Raises:
        CheckpointError: a checkpoint has no adapters, or those of another base than the first one.
        ConfigurationError: two adapters have the same name, or there are not as many names as checkpoints.
    """
    if names is not None and len(names) != len(paths):
        raise ConfigurationError(
            f"{len(names)} names for the adapters of {len(paths)} checkpoints; give each one name."
        )
    opened = [checkpoint.open(path) for path in paths]
    first = description(opened[0])
    joined: list[LoRA] = []
    views: dict[str, View] = {}
    with alone() as group:
        for number, one in enumerate(opened):
            check_base(one, first["family"], first["config"])
            for lora in adapters_of(one) if names is None else [chosen_adapter(one, None)]:
                name = lora.adapter if names is None else names[number]
                if any(name == other.adapter for other in joined):
                    raise ConfigurationError(f"two adapters have the name {name!r}; name each by names (--names).")
                joined.append(replace(lora, adapter=name))
                chosen = {_renamed(old, name): old for old in tensors_of(one, lora.adapter)}
                views |= views_of_source(SelectedSource(FullPrecision(one), chosen), chosen, None, group)
        common = {"model": {**first, "transforms": describe(joined), BASE: False}}
        checkpoint.save(output, views, common=common, files=companions_of(paths[0]), process_group=group)
    return [lora.adapter for lora in joined]


def _renamed(name: str, adapter: str) -> str:
    """Return the name of an adapter's tensor for another name of the adapter."""
    parsed = parse_tensor_name(name)
    assert parsed is not None
    return tensor_name(parsed[0], parsed[1], adapter)


# Merging: a checkpoint of a plain model


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
