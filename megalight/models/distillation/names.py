"""Names of places in a model at which hidden states can be compared."""

from __future__ import annotations

import re
from collections.abc import Collection

from megalight.errors import ConfigurationError, nearest

PARTS = {
    "self_attention": "attention",
    "self_attention.linear_proj": "attention",
    "input_layernorm": "attention_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc2": "mlp",
    "mixer": "mamba",
    "norm": "mamba_norm",
}
"""Megatron's names of parts of a layer -> ours."""


def place(name: str) -> str:
    """Return our name of a place that Megatron names, and other names as they are."""
    if name == "decoder.final_layernorm":
        return "head.norm"
    found = re.fullmatch(r"decoder\.(layers\.\d+)(?:\.(.+))?", name)
    if found is None:
        return name
    layer, part = found.groups()
    return layer if part is None else f"{layer}.{PARTS.get(part, part)}"


def check_place(name: str, known: Collection[str], model: str) -> None:
    """Refuse a place that a model does not have.

    Args:
        model: which model, for the error.

    Raises:
        ConfigurationError: names what it has.
    """
    if place(name) in known:
        return
    layers = sum(other.count(".") == 1 for other in known) - 1
    first = [other for other in known if other.startswith("layers.0")]
    raise ConfigurationError(
        f"{model} has no place {name!r} whose hidden states could be compared."
        + nearest(place(name), known)
        + f" It has {layers} layers, from layers.0 to layers.{layers - 1}; places of the first are {', '.join(first)}, "
        "and head.norm is the final norm."
    )
