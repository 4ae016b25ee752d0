"""Models with their weights, where they are: in a checkpoint, in a ``transformers`` folder, or in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megalight import checkpoint
from megalight.checkpoint.foreign.transformers_folder import describe, is_folder, read_config, values
from megalight.checkpoint.inspection import Compared, Difference, DiffSource, TensorKind, differences
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.run import STATE
from megalight.checkpoint.sources import AveragedSource, FullPrecision, OverlaySource, TensorSource, canonical
from megalight.checkpoint.view import views_of_source
from megalight.errors import CheckpointError, ConfigurationError
from megalight.hub import local
from megalight.models.config import compare
from megalight.models.family import Family, family, family_of_transformers
from megalight.models.gpt import megatron
from megalight.models.loading import (
    BASE,
    PREFIX,
    Keys,
    check_held,
    companions_of,
    description,
    holds_base,
    initial_config,
    refuse_keys,
    saved_config,
    serving,
    unread_of,
    whole_source,
    without_training_parts,
)
from megalight.nn.canonical import canonical_tensors
from megalight.parallel.source import RenamedSource, Source, Target

AVERAGE = "ema."
"""Prefix of moving averages in checkpoints."""


@dataclass(frozen=True)
class StoredModel:
    """A model, and where its weights are.

    Attributes:
        family: its family.
        config: its configuration.
        weights: the source of its canonical tensors, whose names begin with ``model.``.
        files: companions from the ``transformers`` folder that training began with, and the tokenizer of the data.
        training: entries with which a run resumes from its optimizer state, if ``weights`` has that too.
        unread: why optimizer state that lies beside the weights cannot be read; empty if it can, or there is none.
        verify: raises CheckpointError if optimizer state is not of these weights; called before it is written.
    """

    family: Family
    config: Any
    weights: Source
    files: Mapping[str, bytes]
    training: Mapping[str, Any] = field(default_factory=dict)
    unread: str = ""
    verify: Callable[[], None] | None = None


def open_model(
    path: str | os.PathLike[str], *, ema: bool = False, keys: Keys = "strict", whole: bool = True
) -> StoredModel:
    """Open the model in a checkpoint, a ``transformers`` folder, or one of Megatron-core. No weights are read.

    Args:
        path: the folder, or a name of the Hugging Face Hub, whose files are then downloaded.
        ema: take the moving averages of the weights, which the callback ``EMA`` keeps in a checkpoint.
        keys: see :func:`~megalight.models.loading.whole_source`.
        whole: whether a checkpoint must hold all layers that its configuration describes; others are never built whole.

    Raises:
        CheckpointError: a file is missing or damaged, the model has adapters, or there are no averages of any step.
        ConfigurationError: the model is of no known family, or has options that are not supported here; ``keys`` for
            what is no folder of ``transformers``.
    """
    path = local(path)
    if is_folder(path):
        if ema:
            raise CheckpointError(f"{path} is a folder of transformers, which has no moving averages of weights.")
        known = family_of_transformers(read_config(path))
        config = initial_config(path, known)
        files = companions_of(path) | unread_of(path, known, config)
        return StoredModel(known, config, whole_source(path, known, config, keys), files)
    refuse_keys(keys, path)
    if megatron.is_folder(path):
        if ema:
            raise CheckpointError(f"{path} is of Megatron-core, which keeps no moving averages of weights.")
        source = megatron.MegatronFolder(path, PREFIX)
        return StoredModel(family("gpt"), source.config, source, {}, source.training, source.unread, source.verify)
    opened = checkpoint.open(path)
    described = description(opened)
    if any(transform.name == "modelopt" for transform in serving(described)):
        raise CheckpointError(
            f"checkpoint {opened.path} is quantized, and its weights alone are another model's. Write it in ModelOpt's "
            "format (megalight convert --to modelopt)."
        )
    if serving(described) or not holds_base(opened.common):
        # The values of such weights are not what the model computes with until the adapters are merged.
        raise CheckpointError(f"checkpoint {opened.path} has adapters; merge them first (megalight merge).")
    known = family(described["family"])
    config = saved_config(described, opened.path)
    if whole:
        check_held(config, (stored.shape for stored in opened.tensors.values()), opened.path)
    weights: Source = FullPrecision(opened)
    if ema:
        # Averages are read in place of the weights of the same names. Tensors without an
        # average stay as they are.
        averages = RenamedSource(canonical(opened), PREFIX, AVERAGE + PREFIX)
        if not averages.tensors:
            raise CheckpointError(
                f"checkpoint {opened.path} has no moving averages; train with the callback EMA, and save more than the "
                "weights alone."
            )
        if not averages_begun(opened):
            raise CheckpointError(
                f"the moving averages in checkpoint {opened.path} have not begun: EMA(start_step=...) counts later "
                "steps. Take a later checkpoint, or the weights."
            )
        weights = OverlaySource(weights, averages)
    weights = without_training_parts(weights, described)
    return StoredModel(known, config, weights, companions_of(path) | unread_of(path, known, config))


def averages_begun(opened: checkpoint.Checkpoint) -> bool:
    """Return whether moving averages in a checkpoint have counted a step. Before, they are the first weights."""
    return bool(opened.common.get("callbacks", {}).get("EMA", {}).get("updates") != 0)


def held_model(name: str, config: Any, model: nn.Module) -> StoredModel:
    """Return a whole model in the memory of this process, of the family ``name``."""
    weights = {PREFIX + key: tensor for key, tensor in canonical_tensors(model).items()}
    return StoredModel(family(name), config, TensorSource(weights), {})


def averaged(models: Sequence[StoredModel]) -> StoredModel:
    """Return the mean of several models of one configuration, weight by weight.

    Raises:
        ConfigurationError: they are of different families or configurations.
    """
    first = models[0]
    for number, other in enumerate(models[1:], 2):
        differences = compare(first.config.to_dict(), other.config.to_dict(), f"model {number}")
        if first.family.name != other.family.name or differences:
            raise ConfigurationError(
                f"models of different configurations cannot be averaged: {'; '.join(differences) or other.family.name}."
            )
    return replace(
        first, weights=AveragedSource(first.weights, [model.weights for model in models[1:]]), training={}, unread=""
    )


def save_model(
    model: StoredModel, path: str | os.PathLike[str], dtype: torch.dtype | None = None, *, optimizer: bool = True
) -> None:
    """Write the model as a checkpoint, with optimizer state if it has any. One process calls it.

    At most ``BUDGET`` bytes of :mod:`~megalight.checkpoint.view`, or one tensor, are in memory at a time.

    Args:
        model: the model.
        path: the folder to write.
        dtype: dtype of the weights. None: as they are stored.
        optimizer: whether optimizer state is written, if there is any.

    Raises:
        CheckpointError: a file is damaged, or ``path`` cannot be written, or there is optimizer state that cannot be
            read and is asked for. Nothing is left behind.
    """
    if model.unread and optimizer:
        raise CheckpointError(
            f"the source holds optimizer state that cannot be imported: {model.unread}. Or take the weights alone "
            "(--weights-only), with which training starts from scratch."
        )
    described = {"family": model.family.name, "config": model.config.to_dict(), "transforms": [], BASE: True}
    names = [name for name in model.weights.tensors if name.startswith(PREFIX)]
    training = model.training if optimizer else {}
    if training and model.verify is not None:
        model.verify()
    states = [name for name in model.weights.tensors if training and name.startswith(STATE)]
    # One process writes, even inside a job with several: nobody else is asked.
    with alone() as group:
        checkpoint.save(
            path,
            {
                **views_of_source(model.weights, names, dtype, group),
                **views_of_source(model.weights, states, None, group),
            },
            common={"model": described, **training},
            files=dict(model.files),
            process_group=group,
        )


# Differences between two folders, by canonical names


class FolderWeights:
    """The weights in a folder of ``transformers``, by canonical name. Packed ones are widened.

    A tensor without a canonical name keeps that of its file.

    Raises:
        CheckpointError: a file is missing or incomplete, or a fused tensor is of another size than the configuration.
        ConfigurationError: the family of the model is not known.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        known = family_of_transformers(read_config(path))
        assert known.weights is not None
        self._source = known.weights.source(path, known.weights.config_of(path), PREFIX, strict=False)
        stored = describe(path).tensors if self._source.skipped else {}
        self._others = {PREFIX + name: stored[name] for name in self._source.skipped if name in stored}
        self.tensors: dict[str, TensorKind] = {**self._others, **self._source.tensors}

    def values(self, name: str) -> NDArray[np.float64]:
        """See :meth:`megalight.checkpoint.inspection.Compared.values`."""
        if name in self._others:
            return values(self._source.path, self._others[name])
        shape = self._source.tensors[name].shape
        whole = torch.empty(shape, dtype=torch.float64)
        self._source.fill([Target(name, shape, (0,) * len(shape), whole)], strict=False)
        return whole.numpy().reshape(*shape, 1)


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> list[Difference]:
    """Compare the weights of two models, each in a folder of ``transformers`` or in a checkpoint of ours.

    Optimizer state and averages are left out. Weights of a checkpoint are compared as they were saved, not as masters.

    Raises:
        CheckpointError: one of them is missing, unfinished or damaged.
        ConfigurationError: a folder holds a model of no known family.
    """
    return differences(_side(one), _side(other), PREFIX)


def _side(path: str | os.PathLike[str]) -> Compared:
    return FolderWeights(path) if is_folder(path) else DiffSource(path)
