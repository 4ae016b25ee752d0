"""Canonical names to those of another library, module by module."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from megalight.errors import CheckpointError

LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
"""A layer's index inside a name."""


def rename(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under other names.

    Args:
        tensors: by name.
        names: module -> module; ``N`` stands for a layer's index.

    Raises:
        CheckpointError: a tensor of a module that has no counterpart.
    """
    renamed = {}
    for name, tensor in tensors.items():
        module, _, leaf = LAYER.sub("N", name).rpartition(".")
        if module not in names:
            raise CheckpointError(f"{name} has no counterpart; known modules: {', '.join(names)}.")
        layer = LAYER.search(name)
        target = names[module].replace(".N.", f".{layer.group()}.") if layer else names[module]
        renamed[f"{target}.{leaf}"] = tensor
    return renamed
