"""Check options against a whole model, before there are processes, and divide them between its parts."""

from __future__ import annotations

import fnmatch
from dataclasses import replace

from torch import nn

from megalight.errors import ConfigurationError
from megalight.ops.linear.low_precision import LowPrecision
from megalight.parallel.layers import tower_layers_of
from megalight.parallel.precision.attention import check_fp8_attention
from megalight.parallel.precision.options import LowPrecisionOptions
from megalight.parallel.precision.weights import (
    check_names,
    chosen_layers,
    language_layers,
    own_names,
    weights_to_cast,
)


def check_low_precision(
    model: nn.Module, options: LowPrecisionOptions, kind: type[LowPrecision] = LowPrecision
) -> None:
    """Check that a model fits, before there are processes.

    Args:
        model: the whole model, split as one rank would; without values.
        options: what a user chose.
        kind: the class that casts and multiplies.

    Raises:
        ConfigurationError: as for :func:`~.apply.apply_low_precision`.
    """
    layers = language_layers(model, options)
    if "vision" in options.towers and not tower_layers_of(model):
        raise ConfigurationError(
            f"towers={list(options.towers)}, and {type(model).__name__} has no vision tower; leave out 'vision'."
        )
    chosen = chosen_layers(model, layers, options, len(layers))
    check_names(own_names(model, layers, options), options)
    if options.fp8_attention:
        check_fp8_attention(chosen)
    for path, layer in chosen.items():
        list(weights_to_cast(path, layer, options, kind))  # it raises what is wrong with a weight


def options_of_part(model: nn.Module, options: LowPrecisionOptions, part: str) -> LowPrecisionOptions | None:
    """Return the options of a part of a model whose parts have layouts of their own; None: its layers keep their dtype.

    Args:
        model: the whole model, before it is divided or split.
        options: those of the whole.
        part: ``language``, or ``vision`` (the vision tower).

    Raises:
        ConfigurationError: as :func:`~.apply.apply_low_precision` for the whole model.
    """
    names = own_names(model, language_layers(model, options), options)
    check_names(names, options)
    own = [name for name in names if name.startswith("tower.") == (part == "vision")]
    modules = tuple(pattern for pattern in options.modules if fnmatch.filter(own, pattern))
    if not modules:
        return None
    found = replace(options, towers=(part,), modules=modules)
    if part == "vision":  # without experts, and without the language model's first and last layers
        return replace(
            found, first_layers=0, last_layers=0, experts_together=False, router_padding_for_quantization=False
        )
    return found
