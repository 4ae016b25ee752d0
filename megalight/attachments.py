"""Attachments: what Megalight keeps in objects of others, all of it here, each with its reason.

A value goes into the object's ``__dict__``: past ``nn.Module.__setattr__``, which would register modules in it and
which users may override. So it is copied with the object and lives as long as it does, unlike in a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Attachment:
    """A value that an object of another class carries for us.

    Args:
        name: the key in the object's ``__dict__``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, owner: object, default: Any = None) -> Any:
        """Return the value that an object carries, or ``default``."""
        return owner.__dict__.get(self.name, default)

    def set(self, owner: object, value: Any) -> Any:
        """Let an object carry a value, and return it."""
        owner.__dict__[self.name] = value
        return value

    def setdefault(self, owner: object, value: Any) -> Any:
        """Return the value that an object carries; let it carry ``value`` if there is none."""
        return owner.__dict__.setdefault(self.name, value)

    def pop(self, owner: object, default: Any = None) -> Any:
        """Take the value from an object and return it, or ``default``."""
        return owner.__dict__.pop(self.name, default)


SHARDING = Attachment("megalight_sharding")
"""Of an optimizer that steps on shards: how. A run, a checkpoint and a later engine get the optimizer alone."""
SPLIT = Attachment("megalight_model")
"""Of a root module: its ``ParallelModel``. A second Trainer gets the split module alone, and continues with it."""
STAGE = Attachment("megalight_stage")
"""Of a chunk of a model of ``transformers``: its ``DeclaredStage``. What runs a pipeline's stages gets the chunk."""
APPLIED = Attachment("megalight_transforms")
"""Of a model: each transform that changed it, with the names of the tensors that it made. A second fit asks again."""
QUANTIZED = Attachment("megalight_quantized")
"""Of a single-device model: path of each module that gets quantizers -> ModelOpt's preset, read after the split."""
CORE = Attachment("megalight_core")
"""Of a model of ``transformers`` whose calls are divided over ranks: its attention, and a multiple of tokens."""
UNIT_HOOKS = Attachment("unit_hooks")
"""Of a unit's module: the hooks of an engine, which the next engine over the module removes."""
GATHER_HOOK = Attachment("gathering")
"""Of a module: the hook that waits for its parameters. It reads no tensor, so fusions and recompute may ignore it."""
FUSED_FORM = Attachment("fused_form")
"""Of a module of ``transformers`` that runs fused ops: what it computes. It has no constructor that could take it."""


def attach_modules(owner: nn.Module, **modules: Any) -> None:
    """Let a module have others as attributes, and not as children: what stands for a layer must not own it, too."""
    owner.__dict__.update(modules)


def shadow_of(module: Any, children: dict[str, Any], **more: Any) -> Any:
    """Return a second object of a module's own class: what it runs with is shared, except its children.

    A copy would copy parameters, and another class would not have the user's methods.

    Args:
        children: the children of the shadow, by name.
        more: further entries of its ``__dict__``.
    """
    shadow = object.__new__(type(module))
    shadow.__dict__ = {**module.__dict__, "_modules": children, **more}
    return shadow


def restore(owner: object, *methods: str) -> None:
    """Let an object have methods of its class again: what lies in the instance hides them."""
    for name in methods:
        owner.__dict__.pop(name, None)


@contextmanager
def overridden(owner: object, **methods: Any) -> Iterator[None]:
    """Let an object have other methods inside: attributes of an instance hide methods of its class.

    Those that lay there before come back.
    """
    hidden = {name: owner.__dict__[name] for name in methods if name in owner.__dict__}
    owner.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del owner.__dict__[name]
        owner.__dict__.update(hidden)
