"""Check the sizes of a model and its split: heads without torch, the rest with torch alone.

Importing Lightning as well would take twice as long.

The configuration's own class, the mesh and :func:`megalight.parallel.apply.check_split` decide, as they do
again before a run. What depends on more than plain values is left to the run.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from importlib import import_module
from math import prod
from typing import Any

from megalight.cli.sources import ClassSource
from megalight.data.sizes import check_fits
from megalight.errors import ConfigurationError
from megalight.models.config import OR_HEAD_DIM, check_heads
from megalight.parallel.degrees import check_degrees, replicas_of

MODULES, STRATEGY, CONFIG = "megalight.models.", "trainer.strategy.", "model.config."
OTHER_HEADS = ("head_dim", "latent", "layer_pattern", "mixer_pattern", "mamba", "delta")
"""Settings with which layers have other heads, or none."""
TOWERS = ("MegatronTowersStrategy", "MegatronTowersBesideStrategy")

PLACES = ("pipeline", "pipeline_layout", "context", "expert", "plan", "transforms")
"""Options of a strategy that decide what can be split, besides the degrees."""


def check(values: Mapping[str, Any], classes: Mapping[str, ClassSource | None], megatron: bool) -> None:
    """Check the model of a command, and how its strategy splits it.

    Args:
        values: dotted key -> value.
        classes: the classes that fill keys.
        megatron: whether the strategy is one of Megalight's.

    Raises:
        ConfigurationError: sizes of the model do not fit together.
        DataError: sequences of the data are too long for the model.
        LayoutError: the model or the ranks do not divide.
    """
    source = classes.get("model")
    if source is None or not source.module.name.startswith(MODULES) or "LOCAL_RANK" in os.environ:
        return  # a rank that somebody started: the command was checked before, or all ranks would say the same
    if source.module.name.startswith(f"{MODULES}gpt."):
        _check_heads(values, megatron)
    length, longest = values.get("data.sequence_length"), values.get(f"{CONFIG}max_sequence_length")
    if type(length) is int and type(longest) is int:
        check_fits(length, longest)
    known = _family(source.module.name.rpartition(".")[0])
    config = None if known is None else _config(known, values)
    if config is not None and type(length) is int:
        check_fits(length, config.max_sequence_length)
    divides = classes.get(STRATEGY.rstrip("."))
    # Towers have a layout of their own; the strategy checks this itself, before it starts processes.
    if config is None or not megatron or (divides is not None and divides.name in TOWERS):
        return
    given = {key[len(STRATEGY) :]: value for key, value in values.items() if key.startswith(STRATEGY)}
    degrees = {
        name: given.get(name, each.default) for name, each in inspect.signature(check_degrees).parameters.items()
    }
    ranks = values.get("trainer.devices"), values.get("trainer.num_nodes", 1)
    counted = all(type(number) is int and number > 0 for number in ranks)
    if not counted or not all(isinstance(each, int) for each in degrees.values()):
        return  # "auto", or -1: all devices of the machine
    decided = {key.partition(".")[0] for key in given}
    _check_split(known, config, ranks[0] * ranks[1], degrees, plain=decided.isdisjoint(PLACES))


def _check_heads(values: Mapping[str, Any], megatron: bool) -> None:
    """Check the heads of a GPT whose layers are all alike, as the model and its split do. This needs no torch."""
    config = {key[len(CONFIG) :]: value for key, value in values.items() if key.startswith(CONFIG)}
    if not {key.partition(".")[0] for key in config}.isdisjoint(OTHER_HEADS) or "model.config" in values:
        return
    size: Any = config.get("hidden_size")
    heads: Any = config.get("num_heads")
    if type(size) is int and type(heads) is int and heads > 0:
        check_heads(size, heads, OR_HEAD_DIM)
    tensor, *others = (values.get(f"{STRATEGY}{axis}_parallel", 1) for axis in ("tensor", "pipeline", "context"))
    ranks = values.get("trainer.devices"), values.get("trainer.num_nodes", 1)
    numbers = tensor, *others, *ranks, heads
    given = {key[len(STRATEGY) :].partition(".")[0] for key in values if key.startswith(STRATEGY)}
    if not megatron or not given.isdisjoint(PLACES) or not all(type(each) is int and each > 0 for each in numbers):
        return
    # Ranks that the degrees do not divide are refused by the mesh, before any layer is.
    if prod(ranks) % prod((tensor, *others)) == 0:
        replicas_of(heads, tensor, "layers.0.attention.q.weight", may_share=False)


def _check_split(known: Any, config: Any, world_size: int, degrees: Mapping[str, int], plain: bool) -> None:
    """Split the model on meta as rank 0 would, if nothing but degrees decides how."""
    import torch

    from megalight.parallel.apply import check_split
    from megalight.parallel.mesh import ParallelMesh
    from megalight.parallel.options import ParallelOptions

    mesh = ParallelMesh(
        world_size,
        tp=degrees["tensor_parallel"],
        cp=degrees["context_parallel"],
        pp=degrees["pipeline_parallel"],
        ep=degrees["expert_parallel"],
        etp=degrees["expert_tensor_parallel"],
    )
    if world_size == 1 or not plain:
        return
    options = ParallelOptions(
        sequence_parallel=bool(degrees["sequence_parallel"]), virtual_pipeline=degrees["virtual_pipeline"]
    )
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        check_split(known.model(config), mesh, options, torch.float32, torch.device("cpu"))


def _family(package: str) -> Any:
    """Return the family of a package, without its module, which needs Lightning."""
    from megalight.models.family import FAMILIES

    import_module(package)
    found = [each for each in map(FAMILIES.__getitem__, FAMILIES) if each.config.__module__.startswith(f"{package}.")]
    return found[0] if len(found) == 1 else None


def _config(known: Any, values: Mapping[str, Any]) -> Any:
    """Return the configuration of the model, or None where only the parser can read it."""
    preset = values.get("model.config")
    if preset is not None:
        return known.presets[preset] if preset in known.presets else None  # noqa: SIM401  it has no `get`
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        if path[:2] == ["model", "config"]:
            place = nested
            for part in path[2:]:
                place = place.setdefault(part, {})
            place[last] = value
    try:
        return known.config.from_dict(_lists(nested)) if nested else None
    except ConfigurationError as error:
        if isinstance(error.__cause__, TypeError):  # a value of another type, which the parser may convert
            return None
        raise
    except (TypeError, ValueError, AttributeError):
        return None


def _lists(value: Any) -> Any:
    """Return lists in place of mappings from 0, 1, ..."""
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(each) for key, each in value.items()}
    return [*inner.values()] if inner and [*inner] == [str(n) for n in range(len(inner))] else inner
