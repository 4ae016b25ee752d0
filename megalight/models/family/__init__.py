"""Families of models. Each has one folder and one registration.

``megalight/models/<family>/__init__.py`` registers its :class:`Family`. Other packages register theirs from the entry
point of their plugin. A checkpoint contains the name of its model's family.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from megalight.checkpoint.disk.publish import place
from megalight.checkpoint.foreign.transformers_folder import CONFIG, image_processor, read_config, tensor_names
from megalight.errors import ConfigurationError
from megalight.first_rank import only_first
from megalight.models.config import compare
from megalight.models.hugging_face.folder import Folder
from megalight.models.hugging_face.weights import WeightMap
from megalight.parallel.model_plans import PLANS
from megalight.parallel.plan import ParallelizePlan
from megalight.registry import Registry

log = logging.getLogger(__name__)
log.addFilter(only_first)


OWN_CONFIG = (
    "The model's configuration is not the folder's (see the warning above). Leave config out to take the folder's."
)
SHOWN = 5
"""Differences that the warning names."""


@cache  # a folder is opened before processes start, and again when its weights are read
def warn_of_differences(folder: str, differences: tuple[str, ...]) -> None:
    """Warn once that a model has other settings than the weights in a folder.

    Only a warning: tensors whose names or shapes differ are refused when they are read.
    """
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        log.warning(
            "the weights in %s are of another configuration: %s%s", folder, "; ".join(differences[:SHOWN]), more
        )


@dataclass(frozen=True)
class WeightConversion:
    """Converts the weights of ``transformers`` models to those of a family and back.

    Attributes:
        kinds: the supported values of ``model_type`` in ``config.json``.
        config: content of ``config.json`` -> configuration.
        map: configuration -> the table of tensors for both directions.
        write_config: configuration and preferred ``model_type`` -> content of ``config.json``.
        without: configuration, and a function that returns the names of a folder's tensors -> the configuration
            without parts that ``config.json`` names and the folder does not hold. None: folders hold all parts.
        processed: configuration, and the settings of a folder's image processor -> the configuration with what these
            say. None: models of this family read no images.
        processors: configuration, content of ``config.json``, and vocabulary of the tokenizer -> content of the files
            that say how images are prepared, by name. None: models of this family read no images.
        with_unread: content of ``config.json``, and names of tensors that the model does not read and the folder has
            all the same -> the content with what they belong to. None: there are no such tensors.
    """

    kinds: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], Any]
    map: Callable[[Any], WeightMap]
    write_config: Callable[[Any, str | None], dict[str, Any]]
    without: Callable[[Any, Callable[[], Collection[str]]], Any] | None = None
    processed: Callable[[Any, Mapping[str, Any]], Any] | None = None
    processors: Callable[[Any, Mapping[str, Any], Collection[str]], dict[str, dict[str, Any]]] | None = None
    with_unread: Callable[[dict[str, Any], Collection[str]], dict[str, Any]] | None = None

    def reads(self, kind: str) -> bool:
        """Return whether models of this ``model_type`` are read. :attr:`kinds` of other families go first."""
        return kind in self.kinds

    def config_of(self, folder: str | os.PathLike[str]) -> Any:
        """Return the configuration of the model in a folder that ``save_pretrained`` wrote.

        Raises:
            CheckpointError: there is no such folder.
            ConfigurationError: the model is of another family, or has options that are not supported here.
        """
        values = read_config(folder)
        if values.get("model_type") not in self.kinds:
            raise ConfigurationError(
                f"{folder} holds a model of type {values.get('model_type')!r}; this family reads "
                f"{', '.join(self.kinds)}."
            )
        try:
            config = self.config(values)
        except ConfigurationError as error:
            raise ConfigurationError(f"{place(folder) / CONFIG}: {error}") from error
        if self.processed is not None:
            config = self.processed(config, image_processor(folder))
        # Names are looked up only by families that ask: listing a folder reads the headers of its files.
        return config if self.without is None else self.without(config, partial(tensor_names, folder))

    def source(self, folder: str | os.PathLike[str], config: Any, prefix: str, *, strict: bool = True) -> Folder:
        """Open the folder as a source of tensors with canonical names.

        Args:
            folder: a folder that ``save_pretrained`` wrote.
            config: configuration of the model to fill. Differences from the folder's configuration are logged.
            prefix: added before every canonical name.
            strict: see :class:`~megalight.models.hugging_face.folder.Folder`.

        Raises:
            CheckpointError: a file is missing or incomplete, or holds tensors of another model.
            ConfigurationError: as in :meth:`config_of`.
        """
        # Only settings that shape weights; dropout and backends are the user's.
        differences = compare(config.to_dict(), self.config_of(folder).to_dict(), "the folder")
        warn_of_differences(os.fspath(folder), tuple(differences))
        return Folder(folder, self.map(config), prefix, strict=strict, remedy=OWN_CONFIG if differences else "")


@dataclass(frozen=True)
class Family:
    """A family as the rest of Megalight sees it.

    Attributes:
        name: its name in checkpoints.
        config: class of its configurations, with ``to_dict`` and ``from_dict``.
        model: class of its one-device model, built from a configuration. Plans are found by this class.
        plan: one-device model -> its parallel plan.
        presets: published configurations by name.
        module: returns the class of its LightningModule. It is called late, because it imports Lightning.
        weights: conversion of ``transformers`` weights, or None.
        generates: whether the model can generate text: it takes states of earlier tokens and returns logits.
    """

    name: str
    config: type[Any]
    model: type[nn.Module]
    plan: Callable[[Any], ParallelizePlan]
    presets: Registry[Any]
    module: Callable[[], type[Any]]
    weights: WeightConversion | None = None
    generates: bool = False

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """Build the one-device model from the plain values of a configuration."""
        return self.model(self.config.from_dict(config))


FAMILIES: Registry[Family] = Registry("model family")
"""Name -> family, for families that have been imported. :func:`family` imports the one it needs."""


def register(new: Family) -> Family:
    """Add a family, and register its plan for models of its class.

    Raises:
        MegalightError: the name is in use.
    """
    FAMILIES.register(new.name)(new)
    # By the name of the class, so that the table of plans imports no model.
    PLANS.register(f"{new.model.__module__}.{new.model.__qualname__}")(new.plan)
    return new


def family(name: str) -> Family:
    """Return the family with this name. Other families in this folder are not imported.

    Raises:
        MegalightError: there is no such family. The message lists the known ones.
    """
    own = _folders()
    # An unknown name may be misspelled: all families are imported, so that the message lists them.
    for folder in [name] if name in own else own:
        import_module(f"{PACKAGE}.{folder}")
    return FAMILIES[name]


def families() -> list[Family]:
    """Return all families, sorted by name."""
    for folder in _folders():
        import_module(f"{PACKAGE}.{folder}")
    return [FAMILIES[name] for name in FAMILIES]


def family_of_transformers(values: Mapping[str, Any]) -> Family:
    """Return the family that can read the ``transformers`` model with this ``config.json``.

    Raises:
        ConfigurationError: no family can.
    """
    kind = values.get("model_type")
    # All families are imported here, as any of them may know the type.
    readers = {known: found for found in families() if found.weights for known in found.weights.kinds}
    if isinstance(kind, str):
        if kind in readers:
            return readers[kind]
        for found in families():
            if found.weights is not None and found.weights.reads(kind):
                return found
    raise ConfigurationError(f"model_type is {kind!r}; weights of {', '.join(sorted(readers))} can be read.")


PACKAGE = __name__.rpartition(".")[0]


@cache
def _folders() -> list[str]:
    """List the families' folders, which are those beside this one with a plan."""
    # Kept, since every module asks several times.
    here = Path(__file__).parent.parent
    # Shared files lie beside the folders of families, and a plan is what only a family has.
    return [found.name for found in pkgutil.iter_modules([str(here)]) if (here / found.name / "plan.py").is_file()]
