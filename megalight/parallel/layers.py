"""Modules of a model, or of a chunk of one: its layers, Megatron's names for them, and overrides of their forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megalight.errors import ConfigurationError


def depths_of(model: nn.Module) -> dict[str, Any]:
    """Return the depths of multi-token prediction of a model, or of a chunk of one, by number."""
    found: dict[str, Any] = getattr(getattr(model, "mtp", None), "depths", {})
    return found


def depth_layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of multi-token prediction of a model, or of a chunk of one, by name."""
    return {
        f"mtp.depths.{number}.layers.{index}": layer
        for number, depth in depths_of(model).items()
        for index, layer in depth.layers.items()
    }


def tower_layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of the vision tower of a model, or of a chunk of one, by name; none if it has no tower."""
    layers = getattr(getattr(getattr(model, "embed", None), "tower", None), "layers", {})
    return {f"embed.tower.layers.{index}": layer for index, layer in layers.items()}


def layers_of(model: nn.Module, needed_by: str | None = None) -> dict[int, nn.Module]:
    """Return the layers under ``model.layers`` in order, by global index.

    Args:
        model: a whole model or a chunk of one.
        needed_by: name of the feature that needs layers, for the error; None: a model may have no layers.

    Raises:
        ConfigurationError: a feature needs layers, and ``layers`` is neither a ``ModuleList`` nor a ``ModuleDict`` with
            numbers as keys.
    """
    layers = getattr(model, "layers", None)
    if isinstance(layers, nn.ModuleList):
        return dict(enumerate(layers))
    if isinstance(layers, nn.ModuleDict) and all(map(str.isdecimal, layers)):
        return {int(index): layer for index, layer in layers.items()}
    if needed_by is None:
        return {}
    found = "has none" if layers is None else f"holds {type(layers).__name__} there"
    raise ConfigurationError(
        f"{needed_by} needs a model with `layers`, an nn.ModuleDict keyed by global index ('0', '1', ...), and "
        f"{type(model).__name__} {found}. Give it that attribute, or do without {needed_by}."
    )


PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
"""The base class of models of ``transformers``, by name: this needs no package."""
LAYER = "transformers.modeling_layers.GradientCheckpointingLayer"
"""The base class of their layers."""


def stacks_of(model: nn.Module) -> list[dict[str, nn.Module]]:
    """Return the layers of models of ``transformers`` in a module: for each list of them, name -> layer, in order."""
    found: dict[str, dict[str, nn.Module]] = {}
    inside = ""
    for name, module in model.named_modules():
        if is_a(module, LAYER) and not (inside and name.startswith(inside)):
            found.setdefault(name.rpartition(".")[0], {})[name] = module
            inside = f"{name}."
    return list(found.values())


def is_transformers(module: nn.Module) -> bool:
    """Return whether a module is a model of ``transformers``."""
    return is_a(module, PRETRAINED)


def is_a(value: object, kind: str) -> bool:
    """Return whether an object is of a class that is given by its full name."""
    return any(f"{each.__module__}.{each.__qualname__}" == kind for each in type(value).__mro__)


ALIASES = {
    "attn_norm": "attention_norm",
    "attn_proj": "attention.proj",
    "core_attn": "attention.inner",
    "expert_fc1": "mlp.experts",  # one module holds both products of all experts
    "layernorm": "*_norm",
    "moe": "mlp",
    "moe_act": "mlp.experts.act",
    "qkv_linear": "attention.qkv",
    "shared_experts": "mlp.shared",
}
"""Megatron's names of modules -> ours."""


def translated(names: Iterable[str]) -> tuple[str, ...]:
    """Return our name of each module that Megatron names, and other names as they are."""
    return tuple(ALIASES.get(name, name) for name in names)


def check_own_forwards(modules: Iterable[tuple[str, nn.Module]], hider: str) -> None:
    """Check that named modules run the forward of their class, before any of them gets another one.

    Args:
        modules: names and modules.
        hider: what is about to replace the forwards, for the message.

    Raises:
        ConfigurationError: the forward of a module was set on the instance.
    """
    for name, module in modules:
        if "forward" in module.__dict__:
            raise ConfigurationError(
                f"{name} ({type(module).__name__}) has a forward that was set on the instance, which {hider} would "
                "hide. Define it in the class, or leave this module out."
            )


class Override(ABC):
    """Replaces the ``forward`` of one module instance; it may be copied together with the module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        check_own_forwards([(name, module)], "recompute")
        self.name = name
        self.module = module
        # An object instead of a closure: it can be recognized and removed, and is copied with its module.
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with recompute in training mode if gradients are enabled."""
        # Without a backward there is nothing to save, and in evaluation nobody expects a second run.
        if torch.is_grad_enabled() and self.module.training:
            return self.recomputed(*args, **kwargs)
        return self.plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        # From the class: the instance's `forward` is this object. So hooks, which `Module.__call__` runs, run once.
        return type(self.module).forward(self.module, *args, **kwargs)

    @abstractmethod
    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, and keep only what is needed to run it again."""
