"""Names of recipes, ``PRESET-PURPOSE-NxGPU``. They are checked without torch, which the recipes themselves need."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from megalight.cli.signatures import find_module
from megalight.errors import ConfigurationError, nearest

GPUS = (1, 4, 8)
PURPOSES = ("pretrain", "lora")
PRESETS = {"megalight.models.gpt.presets": PURPOSES, "megalight.models.bert.presets": PURPOSES[:1]}
"""Module of a family's presets -> the purposes of its recipes. Adapters are for models of text."""


def check_name(name: str) -> None:
    """Refuse a name that no recipe can have. One with a known preset may still have none, if it does not fit.

    Raises:
        ConfigurationError: see :func:`no_recipe`.
    """
    possible = [
        f"{preset}-{purpose}-{gpus}xGPU"
        for module, purposes in PRESETS.items()
        for preset in preset_names(module)
        for purpose in purposes
        for gpus in GPUS
    ]
    if name not in possible:
        raise no_recipe(name, possible)


def no_recipe(name: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for a name that is none of ``known``."""
    return ConfigurationError(
        f"{name!r} names no recipe.{nearest(name, known)} `megalight recipes` lists them; a preset that does not "
        "fit on a number of GPUs has none, nor has one that reads images."
    )


def preset_names(module: str) -> Iterator[str]:
    """Yield the names of presets in the source of a module: the keys of the dict that it registers in a loop."""
    found = find_module(module)
    assert found is not None
    for node in ast.parse(found.path.read_bytes()).body:
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Attribute):
            table = node.iter.func.value
            keys = table.keys if isinstance(table, ast.Dict) else []
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
