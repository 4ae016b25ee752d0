"""Families of models: one folder and one registration each.

``megalight/models/<family>/__init__.py`` registers its :class:`Family`, and another package registers its own from its
plugin's entry point. Checkpoints name the family of their model.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from megalight.errors import ConfigurationError
from megalight.models.config import compare
from megalight.models.folder import Folder, read_config
from megalight.models.weights import WeightMap
from megalight.parallel.plan import Plan
from megalight.parallel.plans import PLANS
from megalight.registry import Registry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """How the weights of a ``transformers`` model become a family's, and back.

    Attributes:
        kinds: values of ``model_type`` in ``config.json`` that can be read.
        config: content of ``config.json`` -> configuration.
        map: configuration -> where its tensors lie in theirs.
    """

    kinds: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], Any]
    map: Callable[[Any], WeightMap]

    def config_of(self, folder: str | os.PathLike[str]) -> Any:
        """The configuration of the model in a folder that ``save_pretrained`` wrote.

        Raises:
            CheckpointError: no such folder.
            ConfigurationError: a model of another family, or with options that have no counterpart here.
        """
        values = read_config(folder)
        if values.get("model_type") not in self.kinds:
            raise ConfigurationError(
                f"{folder} holds a model of type {values.get('model_type')!r}; this family reads "
                f"{', '.join(self.kinds)}."
            )
        return self.config(values)

    def source(self, folder: str | os.PathLike[str], config: Any, prefix: str) -> Folder:
        """The folder's tensors under canonical names.

        Args:
            folder: what ``save_pretrained`` wrote.
            config: of the model that is to be filled. Where it differs from the folder's, the log says so.
            prefix: put before every canonical name.

        Raises:
            CheckpointError: a file is missing or torn, or holds tensors of another model.
            ConfigurationError: as :meth:`config_of`.
        """
        differences = compare(config.to_dict(), self.config_of(folder).to_dict(), "the folder")
        if differences:
            log.warning("the weights in %s are of another configuration: %s", folder, "; ".join(differences))
        return Folder(folder, self.map(config), prefix)


@dataclass(frozen=True)
class Family:
    """What the rest of the product knows of a family.

    Attributes:
        name: in checkpoints.
        config: class of its configurations, with ``to_dict`` and ``from_dict``.
        model: configuration -> one-device model; the class, so that a plan can be found by it.
        plan: one-device model -> how it splits.
        presets: published configurations by name.
        module: gives the class of its LightningModule; called late, as it brings Lightning.
        weights: how weights of ``transformers`` become its own; None: it has no map.
        generates: its model writes text: it takes caches of keys and values and returns logits.
    """

    name: str
    config: type[Any]
    model: type[nn.Module]
    plan: Callable[[Any], Plan]
    presets: Registry[Any]
    module: Callable[[], type[Any]]
    weights: Weights | None = None
    generates: bool = False

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """The one-device model of a configuration's plain values."""
        return self.model(self.config.from_dict(config))


FAMILIES: Registry[Family] = Registry("model family")
"""Name -> family, of those that have been imported; :func:`family` imports what it needs."""


def register(new: Family) -> Family:
    """Add a family, and its plan for models of its type.

    Raises:
        MegalightError: its name is taken.
    """
    FAMILIES.register(new.name)(new)
    PLANS.register(f"{new.model.__module__}.{new.model.__qualname__}")(new.plan)
    return new


def family(name: str) -> Family:
    """The family of this name; of the tree's own, no other is imported.

    Raises:
        MegalightError: there is none; the message lists the known ones.
    """
    own = _folders()
    for folder in [name] if name in own else own:
        import_module(f"{PACKAGE}.{folder}")
    return FAMILIES[name]


def families() -> list[Family]:
    """All families, by name."""
    for folder in _folders():
        import_module(f"{PACKAGE}.{folder}")
    return [FAMILIES[name] for name in FAMILIES]


def family_of_transformers(values: Mapping[str, Any]) -> Family:
    """The family that reads the weights of the ``transformers`` model with this ``config.json``.

    Raises:
        ConfigurationError: none does.
    """
    kind = values.get("model_type")
    readers = {known: found for found in families() if found.weights for known in found.weights.kinds}
    if kind not in readers:
        raise ConfigurationError(f"model_type is {kind!r}; weights of {', '.join(sorted(readers))} can be read.")
    return readers[kind]


PACKAGE = __name__.rpartition(".")[0]


def _folders() -> list[str]:
    """Folders beside this one: those with a plan are families."""
    here = Path(__file__).parent.parent
    return [found.name for found in pkgutil.iter_modules([str(here)]) if (here / found.name / "plan.py").is_file()]
